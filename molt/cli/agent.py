"""`molt agent check FILE`: one episode of an agent against a scripted model, and the token tree it leaves."""

import argparse
import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from molt.agents.chat_runner import ChatAgentRunner
from molt.agents.load import load_runner
from molt.agents.step_runner import EpisodeContext
from molt.chat.chat_renderer import load_chat_renderer
from molt.chat.render import load_renderer
from molt.chat.tree import Tree
from molt.data.prompts import as_tools
from molt.errors import ConfigError, UnusableRow
from molt.types import Media, Prompt, Turn


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="molt agent check", description=__doc__)
    parser.add_argument("check", choices=["check"])
    parser.add_argument("file", help="what --train.agent_path names")
    parser.add_argument("--model", required=True, help="a model whose tokenizer and template are used; no weights")
    parser.add_argument("--prompt", default="Say hello.", help="the user's message, or the text without a template")
    parser.add_argument("--label", help="the row's label; JSON if it is")
    parser.add_argument(
        "--answer", action="append", help="what the model says; again for the next turn; the last stays"
    )
    parser.add_argument("--tools", help="a JSON file: the list of tools that the model is offered")
    parser.add_argument("--no_chat", action="store_true", help="the prompt is plain text")
    parser.add_argument("--max_len", type=int, default=4096)
    parser.add_argument("--timeout_s", type=float, default=60.0)
    asked = parser.parse_args(argv)
    print(asyncio.run(_check(asked)))
    return 0


async def _check(asked: argparse.Namespace) -> str:
    runner = load_runner(asked.file)
    chats = isinstance(runner, ChatAgentRunner)
    if chats and asked.no_chat:
        raise ConfigError(f"--no_chat with {asked.file}: a ChatAgent talks in messages. Drop --no_chat.")
    renderer = load_renderer(asked.model, None, apply_chat_template=not asked.no_chat)
    tools = _tools(asked.tools) if asked.tools else None
    chat = load_chat_renderer(asked.model, None) if chats or tools or runner.judge else None
    messages = None if asked.no_chat else [{"role": "user", "content": asked.prompt}]
    text, label = asked.prompt if asked.no_chat else None, _label(asked.label)
    prompt = Prompt(0, 0, 0, messages, text, label, "check", tools=tools)
    answers = asked.answer or ["hello"]
    script = itertools.chain(answers, itertools.repeat(answers[-1]))
    ends = (chat or renderer).eos_ids[:1]

    async def call_model(prompt_ids: list[int], max_tokens: int, *_: Any, media: tuple[Media, ...] = ()) -> Turn:
        ids = np.asarray([*renderer.tokenizer.encode(next(script), add_special_tokens=False), *ends], np.int32)
        reason = "stop" if len(ids) <= max_tokens else "length"
        ids = ids[:max_tokens]
        logprobs, versions = np.full(len(ids), -1.0, np.float32), np.zeros(len(ids), np.int32)
        return Turn(np.asarray(prompt_ids, np.int32), ids, logprobs, versions, reason)

    context = EpisodeContext(
        prompt, call_model, renderer, 0, asked.max_len, max_turns=64, chat=chat, call_freely=call_model
    )
    async with asyncio.timeout(asked.timeout_s):
        episode = await runner.run(context)
    tree = episode.tree or _as_tree(episode.turns)
    kind, outcome = type(episode.outcome).__name__, episode.outcome
    ending = f"{kind}: reward {outcome.reward:g}, score {outcome.score:g}" + ", truncated" * episode.truncated
    info = "".join(f"\n  {name} {value:g}" for name, value in episode.info.items())
    samples = tree.samples()
    trained = sum(int(sample.mask.sum()) for sample in samples)
    told = f"{len(tree.nodes)} calls, {len(samples)} samples, {trained} trained tokens"
    return f"{tree.show(renderer.tokenizer.decode)}\n{told}\n{ending}{info}"


def _as_tree(turns: list[Turn]) -> Tree:
    """The one stream of an `Env`."""
    tree, messages = Tree(), []
    for number, turn in enumerate(turns):
        messages = [*messages, {"role": "user", "content": str(number)}]
        reply = {"role": "assistant", "content": f"answer {number}"}
        tree.add(tree.match(messages), turn.prompt_ids.tolist(), turn, reply)
        messages = [*messages, reply]
    return tree


def _tools(path: str) -> list[dict[str, Any]] | None:
    try:
        return as_tools(Path(path).read_text(), "--tools")
    except (OSError, UnusableRow) as error:
        raise ConfigError(f"--tools {path}: {error}; no tools can be offered. Name a JSON list of schemas.") from error


def _label(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text
