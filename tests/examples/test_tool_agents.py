"""`tool_env.py` and `chat_tools.py` against a scripted model, in the format of Qwen3."""

import asyncio
import json
import ssl
import sys
from pathlib import Path

import numpy as np
import pytest

from molt.agents.load import load_runner
from molt.agents.step_runner import EpisodeContext
from molt.chat.chat_renderer import ChatRenderer
from molt.chat.render import Renderer
from molt.types import Prompt
from tests.streams import turn_from
from tests.tiny import END_ID, QWEN3, char_tokenizer

AGENTS = Path(__file__).resolve().parents[2] / "examples" / "python" / "agents"
TOKENIZER = char_tokenizer(QWEN3)


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(file: str, label: str, *answers: str):
    """The episode, and the text of the last prompt."""
    answers, prompts = list(answers), []

    async def model(prompt_ids, max_tokens, media=()):
        prompts.append(TOKENIZER.decode(prompt_ids))
        ids = np.asarray([*TOKENIZER.encode(answers.pop(0), add_special_tokens=False), END_ID], np.int32)
        logprobs, versions = np.full(len(ids), -0.5, np.float32), np.full(len(ids), 3, np.int32)
        return turn_from(np.asarray(prompt_ids, np.int32), ids, logprobs, versions, "stop")

    runner = load_runner(str(AGENTS / file))
    tool = {"type": "function", "function": {"name": "python", "parameters": {"type": "object", "properties": {}}}}
    prompt = Prompt(0, 0, 0, [{"role": "user", "content": "6 * 7?"}], None, label, tools=[tool])
    renderer, chat = Renderer(TOKENIZER, apply_chat_template=True), ChatRenderer(TOKENIZER, [END_ID])

    async def episode():
        played = await runner.run(EpisodeContext(prompt, model, renderer, 0, 5000, max_turns=6, chat=chat))
        if getattr(runner, "_server", None):
            await (await runner._server).__aexit__()
        return played

    return asyncio.run(episode()), prompts


def test_the_model_sees_what_its_code_printed():
    episode, prompts = play("tool_env.py", "42", call("python", code="print(6 * 7)"), "So it is\n42")
    assert "<tool_response>42\n</tool_response>" in prompts[1]
    assert episode.outcome.reward == 1.0 and episode.info == {"turns": 2, "chat_tool_offers": 2, "chat_tool_calls": 1}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('<tool_call>\n{"name": "python", "argum\n</tool_call>', "not valid JSON"),
        (call("ruby", code="1"), "There is one tool"),
        (call("python", code=7), "There is one tool"),
        (call("python", code="pass"), "(nothing was printed)"),
        (call("python", code="1 / 0"), "ZeroDivisionError"),
    ],
)
def test_a_call_that_goes_wrong_is_told_and_the_episode_goes_on(said, told):
    episode, prompts = play("tool_env.py", "42", said, "43")
    assert told in prompts[1] and episode.outcome.reward == 0.0


def test_a_client_with_a_tool_loop_of_its_own():
    both = call("calculate", expression="6*(3+4)") + call("calculate", expression="2**9")
    episode, prompts = play("chat_tools.py", "42", both, "It is 42")
    assert "<tool_response>42</tool_response>" in prompts[1] and "error: only numbers" in prompts[1]
    assert episode.outcome.reward == 1.0 and episode.info["calls"] == 2
    (sample,) = episode.samples
    assert TOKENIZER.decode(sample.token_ids[sample.mask]) == f"{both}<|im_end|>It is 42<|im_end|>"


@pytest.mark.parametrize(("said", "right"), [("It is 42.", 1.0), ("42", 1.0), ("It is 142", 0.0), ("", 0.0)])
def test_the_last_word_is_the_answer(said, right):
    assert play("chat_tools.py", "42", said)[0].outcome.reward == right


def test_an_expression_that_cannot_be_read_is_told():
    module = sys.modules[load_runner(str(AGENTS / "chat_tools.py")).agent_class.__module__]
    assert module.calculate("-" * 7000 + "1").startswith("error: ")


def test_a_model_that_only_calls_is_cut():
    episode, _ = play("chat_tools.py", "42", *[call("calculate", expression="1+1")] * 5)
    assert episode.truncated and episode.outcome.reward == 0.0 and episode.info["calls"] == 5


@pytest.mark.parametrize("file", ["chat_minimal.py", "chat_tools.py"])
def test_a_client_of_each_rollout_loads_no_certificates(file, monkeypatch):
    loaded = []
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_, **__: loaded.append(file))
    episode, _ = play(file, "42", "42")
    assert episode.outcome.reward == 1.0 and loaded == []
