"""Kill it anywhere, resume exactly; full disks; the best checkpoint. All over `FakeEngine`.

A driver is killed by SIGKILL at moments of `tests/killed.py`, again and again in one run, and the run is
compared with one that was left alone.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from molt.errors import CheckpointError, ConfigError
from molt.records import checkpoints
from molt.records.best import BestModel
from molt.records.checkpoints import Checkpoints
from molt.records.evaluator import Evaluator
from molt.records.steps import StepRecords
from molt.train.checkpoint import begin, checkpoint_step, latest_checkpoint
from molt.types import Metric
from tests.runs import events, flags, metrics, run, settings, trained_groups, write_prompts

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parent.parent


def run_killed(warm_workers: dict[str, str], arguments: list[str], output: Path, moment: str, step: int) -> None:
    """A process of its own that resumes and dies at the moment. What it leaves behind may still be ending."""
    command = [sys.executable, "-m", "tests.killed", moment, str(step), *arguments, "--ckpt.load_enable"]
    log = output.with_suffix(".log")
    with log.open("w") as file:
        environment = os.environ | warm_workers
        done = subprocess.run(command, cwd=ROOT, timeout=500, stdout=file, stderr=file, env=environment)
    assert done.returncode == -signal.SIGKILL, f"not killed at {moment} {step}:\n{log.read_text()[-3000:]}"


def lines(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]


def measured(output: Path) -> list[dict]:
    """Everything in metrics.jsonl that is not a matter of speed or of failures."""
    speed = ("time", "perf/", "timing/", "faults/")
    return [{k: v for k, v in line.items() if not k.startswith(speed)} for line in lines(output)]


def best_of(output: Path) -> dict:
    best = json.loads((output / "checkpoints" / "best.json").read_text())
    assert best.pop("format") == 2
    return best


def assert_same_bits(a: Path, b: Path) -> None:
    a, b = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_one_lineage(output: Path, steps: int, groups: list[str]) -> None:
    """Every group trained once, every step there once, in the metrics and in the rollouts."""
    assert sorted(trained_groups(output)) == sorted(groups)
    assert [line["step"] for line in lines(output) if "train/loss" in line] == list(range(1, steps + 1))
    stored = sorted((output / "run" / "rollouts").iterdir())
    assert [path.stem for path in stored] == [f"step_{step:06d}" for step in range(1, steps + 1)]
    assert not list((output / "checkpoints").glob("*.tmp"))


def test_a_run_that_is_killed_five_times_ends_with_the_same_bits(ray_session, model_dir, tmp_path):
    """Two epochs of 8 steps, saved every 3, evaluated every 4; no step is trained on stale tokens."""
    prompts, held_out = write_prompts(tmp_path / "p.jsonl", 32), write_prompts(tmp_path / "e.jsonl", 6)
    more = ["--train.async_queue_size", "0", "--train.num_episodes", "2", "--ckpt.save_steps", "3",
            "--algo.advantage.estimator", "reinforce_baseline", "--eval.dataset", held_out, "--eval.steps", "4",
            "--ckpt.max_num", "1", "--actor.lr_scheduler", "cosine", "--train.batch_size", "8"]  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(settings(model_dir, whole, prompts, *more))
    arguments = flags(model_dir, killed, prompts, *more)
    for moment, step in [
        ("trained", 2),  # in the middle of a step, before the first checkpoint
        ("best", 4),  # right after a checkpoint
        ("saving", 6),
        ("recorded", 8),  # between the epochs, with groups in flight
        ("ending", 16),  # after the last step
    ]:
        run_killed(ray_session, arguments, killed, moment, step)
    run(settings(model_dir, killed, prompts, *more, "--ckpt.load_enable"))
    resumed_from = [event["step"] for event in events(killed, "resumed")]
    assert resumed_from[:4] == [-1, -1, 4, 4]  # each start, the first included, was told to resume
    assert resumed_from[4] in (6, 8) and resumed_from[5] == 16  # 8 was saved if it was the best
    assert_one_lineage(killed, 16, [f"{epoch}:{i}" for epoch in (0, 1) for i in range(32)])
    assert (killed / "run" / "abandoned").is_dir() and not (whole / "run" / "abandoned").exists()
    assert measured(killed) == measured(whole)
    assert_same_bits(killed, whole)
    assert_same_bits(killed / "best", whole / "best")
    assert best_of(killed) == best_of(whole)
    kept = {int(path.name.removeprefix("step_")) for path in (killed / "checkpoints").glob("step_*")}
    assert kept == {best_of(whole)["step"], 16}


def test_killed_with_groups_in_the_buffer_and_in_flight_every_prompt_is_trained_once(
    ray_session, model_dir, tmp_path, capsys
):
    output, prompts = tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 48)
    arguments = flags(model_dir, output, prompts, "--train.async_queue_size", "2", "--ckpt.save_steps", "2")
    run_killed(
        ray_session, arguments, output, "trained", 8
    )  # in the middle of a step; 6 is saved, or was being written
    buffered = {event["step"]: event["buffered"] for event in events(output, "checkpoint")}
    run(settings(model_dir, output, prompts, "--train.async_queue_size", "2", "--ckpt.load_enable"))
    resumed_from = events(output, "resumed")[1]["step"]
    assert resumed_from in (4, 6) and buffered[resumed_from] > 0
    line = f"{buffered[resumed_from]} finished groups are in the buffer; step"
    again = {4: f"{line}s 5 to 7 are trained again", 6: f"{line} 7 is trained again"}
    assert again[resumed_from] in capsys.readouterr().out
    assert_one_lineage(output, 12, [f"0:{i}" for i in range(48)])
    # The steps up to 7 were published: what is resumed goes out as version 8, and no token counts as older for that.
    published = [event["version"] for event in events(output, "publication")]
    assert published == list(range(8 + 13 - resumed_from))
    assert max(metrics(output, "staleness/max")) <= 2


def stored(output: Path) -> list[list[dict]]:
    """Every trained token with its version, by step and group."""
    columns = ["group_id", "rollout", "reward", "version_trained", "token_ids", "versions"]
    return [pq.read_table(path, columns=columns).to_pylist() for path in sorted((output / "run/rollouts").iterdir())]


def test_sigterm_anywhere_and_a_resume_train_what_an_undisturbed_run_does(
    ray_session, model_dir, tmp_path, monkeypatch, capsys
):
    """In the middle of the first of two epochs, at its end, and after the last step, while it is saved."""
    whole, parts, prompts = tmp_path / "whole", tmp_path / "parts", write_prompts(tmp_path / "p.jsonl", 8)
    more = ("--train.async_queue_size", "0", "--train.num_episodes", "2", "--rollout.max_new_tokens", "16")
    run(settings(model_dir, whole, prompts, *more))
    write = StepRecords.write
    for last in (1, 2, 4):

        async def then_stop(self, step, *args, last=last):
            await write(self, step, *args)
            if step == last:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.1)  # for the event loop to take it

        with monkeypatch.context() as stopping:
            stopping.setattr(StepRecords, "write", then_stop)
            run(settings(model_dir, parts, prompts, *more, "--ckpt.load_enable"))
        assert lines(parts)[-1]["step"] == last and not (parts / "model.safetensors").exists()
    said = capsys.readouterr()
    assert "nothing is left" not in said.out
    assert said.err.count("SIGTERM: the run saves and ends after this step") == 3
    for last in (1, 2, 4):
        assert f"saved step {last} in {parts / 'checkpoints'}; the same command with --ckpt.load_enable" in said.out
    run(settings(model_dir, parts, prompts, *more, "--ckpt.load_enable"))
    assert "step 4: nothing is left to train. Raise --train.num_episodes" in capsys.readouterr().out
    assert [event["step"] for event in events(parts, "resumed")] == [-1, 1, 2, 4]
    # A resume publishes what it found under the version that it had.
    assert [event["version"] for event in events(parts, "publication")] == [0, 1, 1, 2, 2, 3, 4, 4]
    assert measured(parts) == measured(whole)
    assert stored(parts) == stored(whole)
    assert_same_bits(parts, whole)


def test_sigterm_in_an_evaluation_saves_and_a_resume_measures_it(ray_session, model_dir, tmp_path, monkeypatch):
    """One that runs beside training, and the last one."""
    output, prompts = tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 16)
    more = ("--eval.dataset", prompts, "--eval.steps", "2", "--train.async_queue_size", "0")
    begin_evaluation = Evaluator.begin
    for last in (2, 4):

        async def then_stop(self, step, version, last=last):
            await begin_evaluation(self, step, version)
            if step == last:
                os.kill(os.getpid(), signal.SIGTERM)
                for _ in range(10):  # the event loop sees the signal before the next batch is taken
                    await asyncio.sleep(0)

        with monkeypatch.context() as stopping:
            stopping.setattr(Evaluator, "begin", then_stop)
            run(settings(model_dir, output, prompts, *more, "--ckpt.load_enable"))
        assert events(output, "checkpoint")[-1]["step"] == last and not (output / "candidate").exists()
        assert last not in [event["version"] for event in events(output, "evaluation")]
    run(settings(model_dir, output, prompts, *more, "--ckpt.load_enable"))
    assert [event["version"] for event in events(output, "evaluation")] == [2, 4]
    assert [line["step"] for line in lines(output) if "train/loss" in line] == [1, 2, 3, 4] and (
        output / "best"
    ).exists()


def test_a_full_disk_stops_the_run_and_the_checkpoint_before_is_resumed(ray_session, model_dir, tmp_path, monkeypatch):
    """First a rank cannot write its part, then the driver cannot write the buffer."""
    output, prompts = tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 40)
    arguments = (model_dir, output, prompts, "--ckpt.save_steps", "2", "--ckpt.load_enable")
    for full_at, file in [(4, "model/__0_0.distcp"), (6, "buffer.json")]:

        def begin_on_a_full_disk(directory, step, full_at=full_at, file=file):
            tmp = begin(directory, step)
            if step == full_at:
                (tmp / file).parent.mkdir(exist_ok=True)
                (tmp / file).symlink_to("/dev/full")
            return tmp

        monkeypatch.setattr(checkpoints, "begin", begin_on_a_full_disk)
        with pytest.raises(CheckpointError, match=rf"step_{full_at:06d}\.tmp could not be .*No space left.*GiB"):
            run(settings(*arguments))
        assert checkpoint_step(latest_checkpoint(output / "checkpoints")) == full_at - 2
    monkeypatch.undo()
    run(settings(*arguments))
    assert [event["step"] for event in events(output, "resumed")] == [-1, 2, 4]
    assert_one_lineage(output, 10, [f"0:{i}" for i in range(40)])


def test_the_best_checkpoint_is_what_was_evaluated_and_is_forgotten_with_its_lineage(ray_session, model_dir, tmp_path):
    output, prompts = tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 40)
    more = ("--eval.dataset", prompts, "--eval.steps", "2", "--ckpt.save_steps", "3", "--ckpt.max_num", "99",
            "--ckpt.save_hf", "--train.async_queue_size", "0")  # fmt: skip
    run(settings(model_dir, output, prompts, *more))
    values = {event["version"]: event["eval/p/pass1"] for event in events(output, "evaluation")}
    assert list(values) == [2, 4, 6, 8, 10]

    def best_until(last):  # the first of the highest
        return max((step for step in values if step <= last), key=lambda step: values[step])

    found = [event["step"] for event in events(output, "best")]
    assert found == sorted({best_until(step) for step in values}) and len(found) > 1
    assert best_of(output) == {"step": found[-1], "metric": "eval/p/pass1", "value": values[found[-1]]}
    for step in found:  # saved although no multiple of 3
        assert (output / "checkpoints" / f"step_{step:06d}" / "manifest.json").exists()
    assert_same_bits(output / "best", output / "checkpoints" / f"step_{found[-1]:06d}" / "hf")
    for path in (output / "checkpoints").glob("step_*"):
        if checkpoint_step(path) >= found[-1]:
            for file in path.rglob("*"):
                file.is_file() and file.unlink()
    with pytest.warns(UserWarning, match="torn"):
        run(settings(model_dir, output, prompts, *more, "--ckpt.load_enable", "--ckpt.best_metric_key", "none"))
    assert best_of(output) == {"step": found[-2], "metric": "eval/p/pass1", "value": values[found[-2]]}
    assert_same_bits(output / "best", output / "checkpoints" / f"step_{found[-2]:06d}" / "hf")


def test_a_metric_that_is_not_evaluated_is_told_and_nothing_is_lost(ray_session, model_dir, tmp_path):
    output, prompts = tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 16)
    evaluated = ("--eval.dataset", prompts, "--eval.steps", "2", "--ckpt.best_metric_key", "eval/nope/pass1")
    with pytest.raises(ConfigError, match=r"\(=eval/nope/pass1\) is not what .*Use one of eval/p/failures, .*eval/p/p"):
        run(settings(model_dir, output, prompts, *evaluated))
    assert checkpoint_step(latest_checkpoint(output / "checkpoints")) == 2
    right = [*evaluated[:-1], "eval/p/pass1", "--ckpt.load_enable"]
    run(settings(model_dir, output, prompts, *right, "--train.max_steps", "2"))
    assert best_of(output)["step"] == 2  # the version that was evaluated under the wrong name counts
    kept = (output / "run" / "config.toml").read_text(), lines(output)
    with pytest.raises(CheckpointError, match="would repeat or skip rows"):
        run(settings(model_dir, output, prompts, *right, "--train.seed", "7"))
    assert ((output / "run" / "config.toml").read_text(), lines(output)) == kept  # the settings to go back to


def test_an_evaluation_that_mostly_failed_is_no_best(model_dir, tmp_path, capsys):
    """One rollout of ten came back, and it was right."""
    config = settings(model_dir, tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 4))
    unused = Checkpoints(config.ckpt, None, None, None, None)
    kept = BestModel(config.ckpt, unused, tmp_path, max_failure_rate=config.rollout.max_failure_rate)
    metrics = {"eval/p/pass1": Metric(1.0, 1), "eval/p/failures": Metric(9.0), "eval/p/response_length": Metric(5.0, 1)}
    assert not asyncio.run(kept.judge(3, metrics))
    assert kept.best is None and not kept.model.exists()
    assert "9 of 10 evaluation rollouts have no result" in capsys.readouterr().err
