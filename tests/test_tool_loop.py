"""Whole runs whose agent is an `Env` of two turns with a tool: real Ray, `FakeEngine`."""

import json
from itertools import groupby
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from molt.chat.render import load_tokenizer
from molt.cli.demo import CHAT_TEMPLATE, build_model
from tests.runs import metrics, run, settings
from tests.tool_sevens import TOOL

pytestmark = pytest.mark.ray
AGENT = str(Path(__file__).parent / "tool_sevens.py")
CALL, BROKEN = '<tool_call>{"name": "f", "arguments": {}}</tool_call>', '<tool_call>{"name"</tool_call>'
"""One token each, so that a random model says them: of 18 tokens, each answer of 4 holds a call in one case of five."""


def test_calls_are_answered_broken_ones_told_and_only_what_was_sampled_is_trained(ray_session, tmp_path):
    model, output, prompts = tmp_path / "model", tmp_path / "out", tmp_path / "p.jsonl"
    build_model(model, seed=0, words=[CALL, BROKEN, "<|tool|>"], chat_template=CHAT_TEMPLATE)
    prompts.write_text("".join(json.dumps({"input": str(n), "label": "", "tools": [TOOL]}) + "\n" for n in range(56)))
    run(settings(str(model), output, str(prompts), "--train.agent_path", AGENT, "--data.tools_key", "tools",
                 "--train.async_queue_size", "0"))  # fmt: skip
    rewards = metrics(output, "rollout/reward")
    assert len(rewards) == 14 and sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2
    assert max(metrics(output, "ratio/log_abs_max")) <= 1e-4
    assert set(metrics(output, "rollout/turns")) == {2}
    assert sum(metrics(output, "rollout/info/malformed")) > 0
    tokenizer, called = load_tokenizer(str(model), None), 0
    for row in pq.read_table(output / "run" / "rollouts" / "step_000001.parquet").to_pylist():
        tokens = zip(row["token_ids"], row["versions"], row["logprobs"], strict=True)
        parts = [(own, list(part)) for own, part in groupby(tokens, key=lambda token: token[1] >= 0)]
        assert [own for own, _ in parts] == [False, True, False, True]
        assert all((logprob < 0) == own for own, part in parts for _, _, logprob in part)
        _, said, told, _ = (tokenizer.decode([token for token, *_ in part]) for _, part in parts)
        calls = said.count(CALL)
        assert told.count("<|tool|>4<|end|>") == calls and told.count("<|user|>9<|end|>") == (not calls)
        called += calls
    assert called
