"""A run with a scheme: a dead runner and a resume start a group again, and it is the same group."""

import re

import pyarrow.parquet as pq
import pytest

from tests.runs import events, metrics, run, settings, write_prompts

pytestmark = pytest.mark.ray
SETTINGS = (
    "--rollout.scheme", "examples/python/schemes/draft_revise.py",
    "--rollout.batch_size", "2",
    "--data.max_len", "192",
    "--train.async_queue_size", "0",
    "--train.max_steps",
)  # fmt: skip


def stored(output):
    """Everything that was trained: group, rollout, reward and text, in order."""
    rows = []
    for path in sorted((output / "run" / "rollouts").glob("step_*.parquet")):
        rows += pq.read_table(path, columns=["group_id", "rollout", "reward", "text"]).to_pylist()
    return rows


def test_a_group_that_starts_again_on_another_runner_or_after_a_resume_is_the_same(ray_session, model_dir, tmp_path):
    whole, disturbed = tmp_path / "whole", tmp_path / "disturbed"
    prompts = write_prompts(tmp_path / "p.jsonl", 6)
    run(settings(model_dir, whole, prompts, *SETTINGS, "3"))

    # Whichever rollout of the prompts 1 and 4 ends first takes its runner with it.
    labels = {row: f"die:{tmp_path / str(row)}" for row in (1, 4)}
    prompts = write_prompts(tmp_path / "q.jsonl", 6, labels)
    for steps in ("1", "3"):
        run(settings(model_dir, disturbed, prompts, *SETTINGS, steps, "--ckpt.load_enable"))
    assert len(events(disturbed, "runner_lost")) == 2 and events(disturbed, "resumed")
    assert not events(disturbed, "group_discarded")
    assert stored(disturbed) == stored(whole)
    assert metrics(disturbed, "train/loss") == metrics(whole, "train/loss")

    rows = stored(whole)
    assert len(rows) == 3 * 2 * 4
    drafts = {(row["group_id"], row["rollout"]): row["text"] for row in rows if row["rollout"] < 2}
    for row in rows:
        if row["rollout"] >= 2:  # rollout 2 revises the first draft, 3 the second
            draft = drafts[row["group_id"], row["rollout"] - 2]
            sampled = draft.rpartition("assistant\n")[2]
            answer = re.sub(r"<\|\w+\|>", "", sampled).strip()  # the scheme gets it without special tokens
            assert answer in row["text"] and "Look for mistakes in your answer" in row["text"]
