"""Whole runs whose agent owns its loop: a stock client, the loopback server, real Ray, `FakeEngine`."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.runs import metrics, run, settings, write_prompts
from tests.tiny import char_tokenizer

pytestmark = pytest.mark.ray
AGENT = str(Path(__file__).parent / "chat_sevens.py")


def test_a_chat_agent_is_trained_on_exactly_what_it_sampled(ray_session, model_dir, tmp_path):
    output = tmp_path / "out"
    run(settings(model_dir, output, write_prompts(tmp_path / "p.jsonl", 56), "--train.agent_path", AGENT,
                 "--train.async_queue_size", "0"))  # fmt: skip
    rewards = metrics(output, "rollout/reward")
    assert len(rewards) == 14 and sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2
    # On-policy, the trainer's log-probs of the recorded tokens are the engine's: nothing was tokenised again.
    assert max(metrics(output, "ratio/log_abs_max")) <= 1e-4
    assert set(metrics(output, "rollout/turns")) == {3}
    rows = pq.read_table(output / "run" / "rollouts" / "step_000001.parquet").to_pylist()
    assert len(rows) == 16  # one segment each: the two turns; the titles are left out
    for row in rows:
        text = char_tokenizer().decode(row["token_ids"])
        assert text.count("again") == 1 and "title" not in text
        assert sum(version >= 0 for version in row["versions"]) == sum(length < 0 for length in row["logprobs"]) <= 8


def test_a_chat_agent_is_evaluated_like_any_other(ray_session, model_dir, tmp_path):
    output, prompts = tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 8)
    run(settings(model_dir, output, prompts, "--train.agent_path", AGENT, "--eval.dataset", prompts))
    assert metrics(output, "eval/p/pass1")
