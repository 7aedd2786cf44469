"""A run with `reward.mask_truncated`: who is left out, who is replaced; its resume and its replay mask the same."""

import json

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from molt.errors import DataError
from molt.spec import resolve
from tests.runs import events, metrics, run, settings, write_prompts

pytestmark = pytest.mark.ray
STEPS = 3
SETTINGS = (
    "--reward.mask_truncated",
    "--rollout.max_new_tokens", "40",
    "--rollout.batch_size", "2",
    "--train.max_steps", str(STEPS),
    "--train.async_queue_size", "0",
    "--actor.adam.lr", "1e-3",
)  # fmt: skip


def stored(output):
    """The rows of all steps: group, rollout, reason of the cut, advantage."""
    rows = []
    for path in sorted((output / "run" / "rollouts").glob("step_*.parquet")):
        rows += pq.read_table(path, columns=["group_id", "rollout", "cut", "truncated", "advantage"]).to_pylist()
    return rows


@pytest.fixture(scope="module")
def whole(ray_session, model_dir, tmp_path_factory):
    """An uninterrupted run and its dump."""
    directory = tmp_path_factory.mktemp("masking")
    prompts = write_prompts(directory / "p.jsonl", 40)
    more = [*SETTINGS, "--train.rollout_dump_dir", str(directory / "dump")]
    run(settings(model_dir, directory / "whole", prompts, *more))
    return directory, prompts


def test_cut_rollouts_have_no_advantage_and_groups_with_too_few_others_are_replaced(whole):
    directory, _ = whole
    output = directory / "whole"
    rows = stored(output)
    assert {row["cut"] for row in rows} == {None, "length"}  # the tiny model ends some answers and not others
    for row in rows:
        assert row["truncated"] is (row["cut"] is not None)
        assert (row["advantage"] is None) is (row["cut"] == "length")
    groups = {row["group_id"] for row in rows}
    assert len(groups) == 2 * STEPS and len(rows) == 4 * len(groups)
    for group in groups:
        assert sum(row["cut"] is None for row in rows if row["group_id"] == group) >= 2

    cut = sum(row["cut"] == "length" for row in rows)
    for name in ("masked", "truncated", "truncated_length"):
        assert sum(metrics(output, f"rollout/{name}")) * 8 == pytest.approx(cut)  # 8 rollouts a step
    assert not any(metrics(output, "rollout/truncated_turns"))
    discarded = events(output, "group_discarded")
    assert discarded and {event["reason"] for event in discarded} == {"too_few_left"}
    counted = sum(metrics(output, "rollout/replaced_too_few_left_count"))
    assert 0 < counted <= len(discarded)  # the last ones may come after the last step
    assert not metrics(output, "faults/discarded_groups")


def same_model(a, b):
    a, b = (load_file(output / "model.safetensors") for output in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_resume_masks_the_same_rollouts(whole, model_dir, tmp_path):
    directory, prompts = whole
    for steps in ("1", "2", str(STEPS)):
        run(settings(model_dir, tmp_path, prompts, *SETTINGS, "--train.max_steps", steps, "--ckpt.load_enable"))
    assert stored(tmp_path) == stored(directory / "whole")
    assert same_model(tmp_path, directory / "whole")


def test_a_replay_masks_the_same_rollouts_and_must_have_the_setting(whole, model_dir, tmp_path):
    directory, prompts = whole
    replay = ("--train.rollout_replay_dir", str(directory / "dump"))
    run(settings(model_dir, tmp_path / "replayed", prompts, *SETTINGS, *replay))
    assert stored(tmp_path / "replayed") == stored(directory / "whole")
    assert same_model(tmp_path / "replayed", directory / "whole")
    saved = json.loads((directory / "dump" / "step_000001" / "buffer.json").read_text())
    assert {rollout["cut"] for group in saved["groups"] for rollout in group["rollouts"]} == {None, "length"}
    with pytest.raises(DataError, match=r"'mask_truncated': True.*its batches would hold other groups"):
        resolve(settings(model_dir, tmp_path / "other", prompts, *SETTINGS[1:], *replay))
