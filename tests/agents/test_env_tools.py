"""An `Env` whose model calls tools: the calls as parsed, and the results in the model's own format."""

import asyncio

import numpy as np
import pytest

from molt.agents import Env, Result, StepEnvRunner
from molt.agents.step_runner import EpisodeContext
from molt.chat.chat_renderer import ChatRenderer
from molt.chat.render import Renderer
from molt.errors import AgentError
from molt.types import Prompt
from tests.streams import turn_from
from tests.tiny import END_ID, QWEN3, char_tokenizer

TOKENIZER = char_tokenizer(QWEN3)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": %d}}\n</tool_call>'


def play(step, *answers, tools=(TOOL,)):
    """One episode; also the texts of the prompts that the model was given."""
    answers, prompts = list(answers), []

    class Adder(Env):
        async def step(self, state):
            return step(dict(state))

    async def call_model(prompt_ids, max_tokens):
        prompts.append(TOKENIZER.decode(prompt_ids))
        ids = np.asarray([*TOKENIZER.encode(answers.pop(0), add_special_tokens=False), END_ID], np.int32)
        logprobs, versions = np.full(len(ids), -0.5, np.float32), np.full(len(ids), 3, np.int32)
        return turn_from(np.asarray(prompt_ids, np.int32), ids, logprobs, versions, "stop")

    prompt = Prompt(0, 0, 0, [{"role": "user", "content": "1 + 2?"}], None, tools=list(tools) or None)
    context = EpisodeContext(
        prompt,
        call_model,
        Renderer(TOKENIZER, apply_chat_template=True),
        0,
        2000,
        chat=ChatRenderer(TOKENIZER, [END_ID]),
    )
    return asyncio.run(StepEnvRunner(Adder).run(context)), prompts


def test_calls_are_parsed_and_results_come_as_tool_messages():
    seen = []

    def step(state):
        seen.append(state)
        if state["tool_calls"]:
            return Result(0.0, [str(sum(c["arguments"].values())) for c in state["tool_calls"]], terminated=False)
        return Result(1.0)

    episode, prompts = play(step, "I add." + CALL % 2 + CALL % 5, "It is 3.")
    assert seen[0]["tool_calls"] == [{"name": "add", "arguments": {"a": 1, "b": b}} for b in (2, 5)]
    assert seen[0]["content"] == "I add." and seen[0]["malformed_calls"] == [] and seen[1]["tool_calls"] == []
    first, second = (turn.token_ids.tolist() for turn in episode.turns)
    assert prompts[1].startswith(prompts[0] + TOKENIZER.decode(first))  # exactly what was sampled
    assert "<tool_response>3</tool_response>" in prompts[1] and "<tool_response>6</tool_response>" in prompts[1]
    assert TOKENIZER.decode(second).startswith("It is 3.") and episode.outcome.reward == 1.0


def test_a_call_that_cannot_be_read_is_the_models_doing_and_goes_on_as_a_message():
    def step(state):
        if state["turn"]:
            return Result(1.0)
        assert state["tool_calls"] == [] and len(state["malformed_calls"]) == 1
        return Result(0.0, f"not a call: {state['malformed_calls'][0][:3]}", terminated=False)

    _, prompts = play(step, '<tool_call>\n{"name": "add", "argum\n</tool_call>', "sorry")
    assert "<|im_start|>user\nnot a call" in prompts[1]


@pytest.mark.parametrize(
    ("answer", "observation", "said"),
    [
        (CALL % 2, ["3", "4"], r"step.* has 2 results for 1 tool calls"),
        (CALL % 2 + CALL % 3, "3", "has 1 results for 2 tool calls"),
        ("none", ["3"], "a list of 1, but the model called no tool"),
    ],
)
def test_results_and_calls_must_match(answer, observation, said):
    with pytest.raises(AgentError, match=said):
        play(lambda state: Result(0.0, observation, terminated=False), answer, "never")


def test_without_tools_a_call_is_text():
    def step(state):
        assert "tool_calls" not in state and "<tool_call>" in state["action"]
        return Result(1.0)

    play(step, CALL % 2, tools=())
