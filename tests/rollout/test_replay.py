"""Batches that one run dumped, trained again by another one without an engine: the same bits."""

import asyncio
import os
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from molt import cluster
from molt.errors import DataError
from molt.records.steps import StepRecords
from molt.rollout.dump import batch_dir, begin_dump, check_dump, dumped_batches
from tests.runs import events, metrics, run, settings, trained_groups, write_prompts

STEPS = 5
TRAINED = ("train/loss", "train/grad_norm", "train/entropy", "ratio/mean", "staleness/mean", "rollout/reward")


def test_batches_are_counted_up_to_the_first_gap(tmp_path):
    for step in (1, 2, 4):
        batch_dir(tmp_path, step).mkdir()
        (batch_dir(tmp_path, step) / "buffer.json").write_text("[]")
    batch_dir(tmp_path, 3).mkdir()  # killed while it was written: its records, which come last, are not there
    assert dumped_batches(tmp_path, {}) == 2


def start_dump(folder, output_dir, identity, step):
    """As a run does; step: that of the checkpoint it resumes, None for a new run."""
    check_dump(folder, identity, resumes=step is not None, output_dir=output_dir)
    begin_dump(folder, identity, after_step=-1 if step is None else step, output_dir=output_dir)


def test_a_dump_holds_one_lineage_of_one_run(tmp_path):
    begin = partial(start_dump, tmp_path, tmp_path / "out")
    begin({"seed": 1}, None)
    for step in (1, 2, 3):
        batch_dir(tmp_path, step).mkdir()
        (batch_dir(tmp_path, step) / "buffer.json").write_text("[]")
    with pytest.raises(DataError, match=r"rollout_dump_dir` \(=.*has batches of another run.*another directory"):
        begin({"seed": 1}, None)
    with pytest.raises(DataError, match="has batches of another run"):  # a resume, but of a run of its own
        start_dump(tmp_path, tmp_path / "elsewhere", {"seed": 1}, -1)
    for step in (None, 2):
        with pytest.raises(DataError, match=r"another run|made with \{'seed': 1\}, this run has \{'seed': 2\}"):
            begin({"seed": 2}, step)
    with pytest.raises(DataError, match=r"rollout_replay_dir.*made with"):
        dumped_batches(tmp_path, {"seed": 2})
    begin({"seed": 1}, 2)  # a resume from step 2: 3 is of the lineage that is abandoned
    assert dumped_batches(tmp_path, {"seed": 1}) == 2


@pytest.mark.ray
def test_without_a_first_batch_there_is_nothing_to_replay(ray_session, model_dir, tmp_path):
    replay = ("--train.rollout_replay_dir", str(tmp_path / "empty"))
    with pytest.raises(
        DataError, match=r"rollout_replay_dir` \(=.*empty\) has no step_000001: .* --train.rollout_dump"
    ):
        run(settings(model_dir, tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 8), *replay))
    assert not (tmp_path / "out").exists()


class Forbidden:
    """The actor class of what a replay does not need."""

    @classmethod
    def options(cls, **_):
        return cls

    @staticmethod
    def remote(*_):
        raise AssertionError("a replay starts no engine and no runner")


def assert_same_run(a, b):
    for name in TRAINED:
        assert metrics(a, name) == metrics(b, name), name
    assert trained_groups(a) == trained_groups(b)
    a, b = (load_file(output / "model.safetensors") for output in (a, b))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.ray
def test_a_replay_and_its_resume_end_with_the_bits_of_the_run(ray_session, model_dir, tmp_path, monkeypatch):
    first, second, dump = tmp_path / "first", tmp_path / "second", str(tmp_path / "dump")
    prompts = write_prompts(tmp_path / "p.jsonl", 4 * STEPS)
    more = ("--rollout.max_new_tokens", "16")
    run(settings(model_dir, first, prompts, *more, "--train.rollout_dump_dir", dump))
    assert max(metrics(first, "staleness/max")) == 1  # what a replay cannot repeat by sampling anew

    monkeypatch.setattr(cluster, "RunnerWorker", Forbidden)
    write = StepRecords.write

    async def then_stop(self, step, *args):
        await write(self, step, *args)
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)  # for the event loop to take it

    replay = settings(model_dir, second, prompts, *more, "--train.rollout_replay_dir", dump)
    with monkeypatch.context() as stopping:
        stopping.setattr(StepRecords, "write", then_stop)
        run(replay, Forbidden)
    assert [event["step"] for event in events(second, "checkpoint")] == [2]
    assert not (second / "model.safetensors").exists()
    run(
        settings(model_dir, second, prompts, *more, "--train.rollout_replay_dir", dump, "--ckpt.load_enable"), Forbidden
    )
    assert_same_run(first, second)
    assert events(second, "resumed")[0]["step"] == 2 and not events(second, "publication")


@pytest.mark.ray
def test_with_full_determinism_two_runs_are_equal(ray_session, model_dir, tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", 12)
    outputs = [tmp_path / "a", tmp_path / "b"]
    for output in outputs:
        run(settings(model_dir, output, prompts, "--train.full_determinism_enable", "--train.async_queue_size", "0",
                     "--rollout.max_new_tokens", "16", "--rollout.num_runners", "2"))  # fmt: skip
    assert max(metrics(outputs[0], "train/grad_norm")) > 0
    assert_same_run(*outputs)
