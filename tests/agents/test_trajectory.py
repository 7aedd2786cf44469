"""What a scorer is given: canonical, complete, and the same in the next run."""

import json
from datetime import date
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.agents import Trajectory
from molt.agents.episode import Episode
from molt.agents.trajectory import json_part
from molt.rollout.reward import as_json, trajectory_of
from molt.types import InfraFailure, Prompt, Scored
from tests.streams import sample_from, turn_from

SAID = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]


def trajectory(**fields):
    values = {
        "prompt": "1 + 1?", "label": 2, "data_source": "sums", "tools": None, "branches": [SAID], "turns": 1,
        "prompt_tokens": 3, "generated_tokens": 2, "context_tokens": 5, "cut_reason": None, "info": {},
        "agent_reward": 0.0, "agent_score": 0.0,
    }  # fmt: skip
    return Trajectory(**(values | fields))


def test_equal_trajectories_have_equal_texts():
    one = trajectory(label={"a": 1, "b": [2, {"d": 3, "c": 4}]})
    other = trajectory(label={"b": [2, {"c": 4, "d": 3}], "a": 1})
    assert one.to_json() == other.to_json() != trajectory(label={"a": 1}).to_json()
    assert trajectory(agent_reward=1.0).to_json() != trajectory().to_json()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(label=JSON, text=st.text())
def test_a_scorer_gets_what_was_there(label, text):
    given = trajectory(label=label, branches=[[{"role": "assistant", "content": text}]], cut_reason="length")
    got = Trajectory.from_json(given.to_json())
    assert got == given and got.answer == text and got.truncated


def test_values_of_datasets_become_json():
    label = {"n": np.int64(3), "v": np.array([1.5, 2.0]), "day": date(2026, 1, 2), "sum": Decimal("0.10")}
    got = Trajectory.from_json(trajectory(label=label).to_json())
    assert got.label == {"n": 3, "v": [1.5, 2.0], "day": "2026-01-02", "sum": "0.10"}
    with pytest.raises(InfraFailure, match=r"scorer_input.*cannot be given to a scorer: object"):
        as_json(trajectory(label=object()))


def test_a_lone_surrogate_survives():
    assert Trajectory.from_json(trajectory(label="\ud83d").to_json()).label == "\ud83d"


def test_the_answer_is_the_text_of_the_last_reply():
    parts = [
        {"type": "text", "text": "tw"},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "text", "text": "o"},
    ]
    tool = {"role": "tool", "content": "42"}
    branches = [[SAID[1]], [*SAID, {"role": "assistant", "content": parts}, tool]]
    assert trajectory(branches=branches).answer == "two" and trajectory(branches=branches).messages[-1] == tool
    never_called = trajectory(branches=[])
    assert never_called.answer == "" and never_called.messages == [{"role": "user", "content": "1 + 1?"}]


def test_info_is_kept_as_far_as_it_is_json():
    info = {"text": "yes", "n": np.float32(0.5), "nested": {"a": [1]}, "object": object(), "set": {1}}
    assert json_part(info) == {"text": "yes", "n": 0.5, "nested": {"a": [1]}}


def sample(prompt, generated):
    """`prompt` tokens, then as many generated ones."""
    versions = np.array([-1] * prompt + [0] * generated, np.int32)
    n = prompt + generated
    return sample_from(np.arange(n), versions, np.zeros(n))


def test_an_episode_as_a_trajectory():
    def call(call_id):
        return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}

    turn = turn_from([0], [0], [0.0], [0], "stop")
    episode = Episode(turns=[turn] * 2, outcome=Scored(0.5, 1.0), info={"chat_replayed": 1.0}, cut="turns")
    episode.returned_info = {"why": "right"}
    episode.messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call("8fz1"), call("q2")]},
        {"role": "tool", "tool_call_id": "q2", "content": "b"},
        {"role": "tool", "tool_call_id": "8fz1", "content": "a"},
    ]
    row = Prompt(0, 7, 7, messages=None, text="go", label="x", data_source="s")
    got = trajectory_of(row, episode, [sample(3, 2), sample(4, 6)])
    # Ids of calls are random: a score kept under them would never be found again.
    (branch,) = got.branches
    assert [each["id"] for each in branch[1]["tool_calls"]] == ["call_0", "call_1"]
    assert [message.get("tool_call_id") for message in branch[2:]] == ["call_1", "call_0"]
    assert (got.prompt, got.label, got.data_source, got.tools) == ("go", "x", "s", None)
    assert (got.turns, got.prompt_tokens, got.generated_tokens, got.context_tokens) == (2, 3, 2 + 6, 10)
    assert got.info == {"why": "right"} and (got.agent_reward, got.agent_score) == (0.5, 1.0)
    assert got.truncated and got.cut_reason == "turns"
    assert "replayed" not in got.to_json()  # of a client whose connection broke: another run has none
    assert json.loads(got.to_json())["branches"] == got.branches
    assert episode.messages[1]["tool_calls"][0]["id"] == "8fz1"  # nothing was changed in place
