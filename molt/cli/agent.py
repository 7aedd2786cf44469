"""`molt agent check FILE`: one episode of an agent against a scripted model, and the token tree it leaves.

The model says what `--answer` says. The prompt and the label are those of `--prompt` and `--label`, or of a row of
`--data` as a run would read it.
"""

import argparse
import asyncio
import dataclasses
import functools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molt.errors import AgentError, ConfigError, UnusableRow
from molt.paths import PATH, PATHS

if TYPE_CHECKING:  # `molt agent check --help` is instant
    from molt.agents.episode import Episode, EpisodeContext
    from molt.chat.render import Renderer
    from molt.chat.tree import Tree
    from molt.types import Prompt, Turn

DEFAULT_ANSWER = "hello"
PATHS_GIVEN = {"file": PATH, "model": PATH, "scorer": PATH, "tools": PATH, "data": PATHS}
"""Arguments that name files."""


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    for name, mark in PATHS_GIVEN.items():
        text = getattr(arguments, name)
        if text is not None:
            setattr(arguments, name, mark.absolute(text))
    return _check(arguments)


def _parser() -> argparse.ArgumentParser:
    outer = argparse.ArgumentParser(prog="molt agent", description="Commands for an agent file.")
    commands = outer.add_subparsers(required=True, metavar="COMMAND")
    parser = commands.add_parser(
        "check",
        help="one episode against a scripted model, and its token tree",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="the agent file, as in --train.agent_path")
    parser.add_argument("--model", required=True, help="a model whose tokenizer and template are used; no weights")
    parser.add_argument("--answer", action="append", help=ANSWER_HELP)
    parser.add_argument("--scorer", metavar="FILE", help="a scorer, as in --reward.scorer, that gives the reward")
    parser.add_argument("--tools", metavar="FILE", help="a JSON file: the list of tools that the model is offered")
    parser.add_argument("--no_chat", action="store_true", help="the prompt is plain text, without a chat template")
    parser.add_argument("--max_len", type=int, default=4096, help="the context in tokens, as --data.max_len")
    parser.add_argument("--timeout_s", type=float, default=60.0, help="deadline of the episode, in seconds")

    own = parser.add_argument_group("a prompt of your own")
    own.add_argument("--prompt", default="Say hello.", help="the user's message, or with --no_chat the text")
    own.add_argument("--label", help="the label, as text: what the agent gets as `label`")
    own.add_argument("--label_json", metavar="JSON", help="the label as JSON, where the column holds no text")

    row = parser.add_argument_group("a row of a dataset, with the keys of the run")
    row.add_argument("--data", metavar="FILE", help="a dataset, as in --data.prompt_dataset")
    row.add_argument("--row", type=int, default=0, help="the number of the row in it, from 0")
    row.add_argument("--data.input_key", dest="input_key", metavar="COLUMN", default="input", help="the prompt")
    row.add_argument("--data.label_key", dest="label_key", metavar="COLUMN", help="the label; None: no label")
    row.add_argument("--data.tools_key", dest="tools_key", metavar="COLUMN", help="the tools; None: no tools")
    return outer


ANSWER_HELP = (
    f"what the model says, {DEFAULT_ANSWER!r} if left out. Repeat it for the following turns; the last one is said "
    "again and again"
)


def _check(arguments: argparse.Namespace) -> int:
    from molt.agents.chat_runner import ChatAgentRunner
    from molt.agents.episode import EpisodeContext
    from molt.agents.load import load_runner, scorer_of
    from molt.chat.chat_renderer import load_chat_renderer
    from molt.cli.episode import MAX_TURNS, Limit, ScriptedModel, play
    from molt.cli.observations import ObservingRenderer
    from molt.types import ReplaceGroup, Scored

    runner = load_runner(arguments.file)
    if isinstance(runner, ChatAgentRunner) and arguments.no_chat:
        raise ConfigError(f"--no_chat with {arguments.file}: a ChatAgent talks in messages. Drop --no_chat.")
    prompt = _prompt(arguments)
    renderer = ObservingRenderer(arguments.model, apply_chat_template=not arguments.no_chat)
    chat = None
    if runner.needs_chat or prompt.tools:
        chat = load_chat_renderer(arguments.model, None)

    print(f"prompt: {_shown(prompt)}")
    print(f"label: {prompt.label!r}", flush=True)
    end_ids = chat.eos_ids if chat is not None else renderer.eos_ids
    model = ScriptedModel(renderer, arguments.answer or [DEFAULT_ANSWER], end_ids[:1])
    context = EpisodeContext(
        prompt=prompt,
        call_model=model.answer,
        renderer=renderer,
        seed=0,
        max_len=arguments.max_len,
        max_turns=MAX_TURNS,
        chat=chat,
        call_freely=model.answer,
    )
    try:
        limit = Limit(arguments.timeout_s, "--timeout_s", fix="raise --timeout_s")
        episode = play(runner, context, arguments.file, limit)
    except ReplaceGroup as replaced:
        raise AgentError(
            f"{arguments.file} raised ReplaceGroup ({replaced.reason}: {replaced.detail}). A run would start another "
            "prompt instead, so there is no episode to show. Use another prompt."
        ) from replaced
    scorer = scorer_of(arguments.file, arguments.scorer)
    if scorer is not None and isinstance(episode.outcome, Scored):
        asyncio.run(_score(scorer, context, episode, arguments))
    print(_report(episode, renderer))
    renderer.warn_of_lost_text()
    _warn_of_order(episode)
    return 0


async def _score(scorer: str, context: "EpisodeContext", episode: "Episode", arguments: argparse.Namespace) -> None:
    """Give the episode the reward of the scorer. Raises a MoltError for what would fail a score in a run."""
    from molt.agents.load import load_runner
    from molt.chat.chat_renderer import load_chat_renderer
    from molt.config import RewardConfig
    from molt.rollout.reward import RewardStage, as_json, trajectory_of
    from molt.rollout.samples import to_sample
    from molt.types import InfraFailure

    samples = episode.samples
    if samples is None:
        samples = [to_sample(episode.turns)] if episode.turns else []
    judge = load_runner(arguments.file)  # the server of the one that played ended with its event loop
    stage = RewardStage(scorer, RewardConfig(scorer_timeout_s=arguments.timeout_s))
    try:
        facts = await stage.pool.facts()
        if facts.wants_judge and context.chat is None:
            context = dataclasses.replace(context, chat=load_chat_renderer(arguments.model, None))
        trajectory = as_json(trajectory_of(context.prompt, episode, samples))
        grade = await stage.score(trajectory, functools.partial(judge.judge_url, context), [])
    except InfraFailure as failure:
        raise AgentError(
            f"{scorer}: {failure.reason}: {failure.detail}. The score would fail in a run. Fix the scorer."
        ) from failure
    finally:
        await stage.close()
    episode.outcome = grade.outcome
    episode.info.update(grade.info)


# The prompt.


def _prompt(arguments: argparse.Namespace) -> "Prompt":
    """From a row of the dataset, or from the command line. Raises a MoltError."""
    from molt.types import Prompt

    if arguments.data is not None:
        return _prompt_of_row(arguments)
    messages = None
    text = None
    if arguments.no_chat:
        text = arguments.prompt
    else:
        messages = [{"role": "user", "content": arguments.prompt}]
    return Prompt(
        epoch=0,
        position=0,
        row=0,
        messages=messages,
        text=text,
        label=_label(arguments),
        data_source="check",
        tools=_tools(arguments.tools),
    )


def _prompt_of_row(arguments: argparse.Namespace) -> "Prompt":
    from molt.config import PromptDataConfig
    from molt.data.prompts import PromptDataset
    from molt.data.rows import load_rows

    if arguments.label is not None or arguments.label_json is not None:
        raise ConfigError("--label with --data: the label is that of the row. Drop one, or name a --data.label_key.")
    rows = load_rows(arguments.data, flag="--data", max_samples=arguments.row + 1)
    data = PromptDataConfig(
        prompt_dataset=arguments.data,
        input_key=arguments.input_key,
        label_key=arguments.label_key,
        tools_key=arguments.tools_key,
        apply_chat_template=not arguments.no_chat,
    )
    dataset = PromptDataset(rows, data)
    if not 0 <= arguments.row < len(dataset):
        raise ConfigError(f"--row (={arguments.row}): {arguments.data} has {len(dataset)} rows. Use a smaller number.")
    try:
        prompt = dataset.prompt(arguments.row)
    except UnusableRow as error:
        raise ConfigError(
            f"--row (={arguments.row}) of {arguments.data}: a row {error}. Correct it, or use another --row."
        ) from error
    if arguments.tools is None:
        return prompt
    return dataclasses.replace(prompt, tools=_tools(arguments.tools))


def _label(arguments: argparse.Namespace) -> Any:
    if arguments.label_json is None:
        return arguments.label
    try:
        return json.loads(arguments.label_json)
    except ValueError as error:
        raise ConfigError(
            f"--label_json (={arguments.label_json}) is not JSON: {error}. Use --label for a label that is text."
        ) from error


def _tools(path: str | None) -> list[dict[str, Any]] | None:
    from molt.chat.messages import read_tools

    if path is None:
        return None
    try:
        return read_tools(Path(path).read_text(encoding="utf-8-sig"), "--tools")
    except (OSError, UnicodeDecodeError, UnusableRow) as error:
        raise ConfigError(f"--tools {path}: {error}; no tools can be offered. Name a JSON list of schemas.") from error


def _shown(prompt: "Prompt") -> str:
    """The prompt for people: text, or one message a line."""
    if prompt.messages is None:
        return str(prompt.text)
    if len(prompt.messages) == 1:
        return str(prompt.messages[0].get("content"))
    lines = [f"  {message['role']}: {message.get('content')}" for message in prompt.messages]
    return "\n".join(["", *lines])


# What the episode leaves.


def _report(episode: "Episode", renderer: "Renderer") -> str:
    tree = episode.tree
    if tree is None:
        tree = _tree_of(episode.turns)
    samples = tree.samples()
    trained_tokens = sum(int(sample.mask.sum()) for sample in samples)
    outcome = episode.outcome
    ending = f"{type(outcome).__name__}: reward {outcome.reward:g}, score {outcome.score:g}"
    if episode.truncated:
        ending += f", truncated ({episode.cut})"
    lines = [
        tree.show(renderer.tokenizer.decode),
        f"{len(tree.nodes)} calls, {len(samples)} samples, {trained_tokens} trained tokens{_branches(tree)}",
        ending,
    ]
    for name, value in episode.info.items():
        lines.append(f"  {name} {value:g}")
    for words, count in episode.refusals.items():
        lines.append(f"  refused {count} times: {words}")
    return "\n".join(lines)


def _branches(tree: "Tree") -> str:
    """`; branches: 1 edit, 2 side`, by their reasons; an empty string without any."""
    reasons = Counter(str(node.reason) for node in tree.nodes if node.reason and node.reason != "root")
    if not reasons:
        return ""
    return "; branches: " + ", ".join(f"{count} {reason}" for reason, count in reasons.items())


def _warn_of_order(episode: "Episode") -> None:
    """Say on the console that the client's messages are not in an order that the model's template takes."""
    adapted = episode.info.get("chat_adapted_messages")
    if adapted:
        print(
            f"warning: {adapted:g} messages of the agent's client are joined to others, or shown as the user's: the "
            "model's chat template refuses or leaves out what was sent. Have the client send one system message, "
            "first, and users and assistants in turn; or pass another template.",
            file=sys.stderr,
        )


def _tree_of(turns: "list[Turn]") -> "Tree":
    """The one stream of an `Env`."""
    from molt.chat.tree import Tree

    tree = Tree()
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        messages = [*messages, {"role": "user", "content": str(number)}]
        reply = {"role": "assistant", "content": f"answer {number}"}
        tree.add(tree.match(messages), turn.prompt_ids.tolist(), turn, reply)
        messages = [*messages, reply]
    return tree
