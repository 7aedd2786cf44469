"""The whole loop over `FakeEngine`: real Ray, real policy ranks, real publications with proof."""

import asyncio
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from molt.algo import advantage
from molt.cli.check import check_output_dir
from molt.driver import drive, drive_evaluation
from molt.errors import CheckpointError, FailureRateError, MoltError, TrainingError
from molt.publish.publication import Publisher
from molt.report.metrics import values
from molt.rollout.evaluate import score
from molt.spec import resolve, resolve_evaluation
from tests.fakes import FakeEngineWorker
from tests.runs import events, metrics, run, settings, trained_groups, write_prompts

pytestmark = pytest.mark.ray
FULL = pytest.mark.full


@pytest.mark.parametrize("queue", [0, 1, pytest.param(2, marks=FULL)])
def test_a_run_learns_and_leaves_what_it_promises(ray_session, model_dir, tmp_path, queue):
    prompts = write_prompts(tmp_path / "p.jsonl", 40)
    output = tmp_path / "out"
    run(settings(model_dir, output, prompts, "--train.async_queue_size", str(queue), "--train.num_episodes", "2",
                 "--ckpt.save_steps", "7", "--ckpt.max_num", "2",
                 "--eval.dataset", prompts, "--eval.eval_at_start"))  # fmt: skip
    rewards = metrics(output, "rollout/reward")
    assert len(rewards) == 20
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2
    assert max(metrics(output, "staleness/max")) <= queue  # that it is reached: tests/rollout/test_admission.py
    assert max(metrics(output, "mismatch/abs_max")) <= 1e-4
    if queue == 0:
        assert max(metrics(output, "ratio/log_abs_max")) <= 1e-4
    assert [e["version"] for e in events(output, "publication")] == list(range(21))
    assert len(events(output, "evaluation")) == 2
    epochs = [sorted(g for g in trained_groups(output) if g.startswith(f"{epoch}:")) for epoch in (0, 1)]
    assert epochs == [sorted(f"{epoch}:{i}" for i in range(40)) for epoch in (0, 1)]
    assert sorted(p.name for p in (output / "checkpoints").glob("step_*")) == ["step_000014", "step_000020"]
    assert (output / "config.json").exists() and (output / "model.safetensors").exists()


def test_zero_advantages_move_nothing(ray_session, model_dir, tmp_path, monkeypatch):
    zero = replace(advantage.ADVANTAGES["grpo"], fn=lambda rewards, groups, ctx: torch.zeros_like(rewards))
    monkeypatch.setitem(advantage.ADVANTAGES, "grpo", zero)
    run(settings(model_dir, tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 12)))
    before, after = load_file(f"{model_dir}/model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_two_ranks_two_engines_two_runners_several_steps_per_batch(ray_session, model_dir, tmp_path):
    output = tmp_path / "out"
    run(settings(model_dir, output, write_prompts(tmp_path / "p.jsonl", 16),
                 "--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2", "--rollout.num_runners", "2",
                 "--train.batch_size", "8", "--train.micro_batch_size", "3", "--train.max_epochs", "2",
                 "--fsdp.packing_samples"))  # fmt: skip
    assert len(metrics(output, "train/loss")) == 4
    assert max(metrics(output, "mismatch/abs_max")) <= 1e-4


@pytest.fixture(scope="module")
def one_rank(ray_session, model_dir, tmp_path_factory):
    """Where a run with one rank and padded micro-batches left its metrics."""
    directory = tmp_path_factory.mktemp("one_rank")
    return layout_run(model_dir, directory, "--train.micro_batch_size", "5")


def layout_run(model_dir, directory, *more):
    prompts = write_prompts(directory / "p.jsonl", 40)
    # So many tokens that the first batch has rewards to learn from.
    run(settings(model_dir, directory / "out", prompts, "--train.async_queue_size", "0",
                 "--rollout.max_new_tokens", "16", *more))  # fmt: skip
    return directory / "out"


@pytest.mark.parametrize("more", [
    pytest.param(("--actor.num_gpus_per_node", "2", "--train.micro_batch_size", "5"), marks=FULL),
    ("--actor.num_gpus_per_node", "2", "--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "100",
     "--fsdp.packing_samples"),
])  # fmt: skip
def test_ranks_and_micro_batches_change_nothing(ray_session, model_dir, one_rank, tmp_path, more):
    output = layout_run(model_dir, tmp_path, *more)
    loss, norm = (metrics(output, f"train/{name}") for name in ("loss", "grad_norm"))
    assert loss[0] == pytest.approx(metrics(one_rank, "train/loss")[0], abs=1e-6)
    assert norm[0] == pytest.approx(metrics(one_rank, "train/grad_norm")[0], rel=1e-5) and norm[0] > 0.01
    for name in ("ratio/mean", "train/entropy", "rollout/reward", "staleness/mean"):
        assert metrics(output, name)[0] == pytest.approx(metrics(one_rank, name)[0], rel=1e-5)
    rewards = metrics(output, "rollout/reward")
    assert len(rewards) == 10 and sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


def test_a_band_that_filters_everything_warns_and_then_stops(ray_session, model_dir, tmp_path, capsys):
    output, prompts = tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 40)
    band = ("--algo.advantage.is_correction_level", "geo", "--algo.advantage.is_correction_threshold", "1.5", "5")
    with pytest.raises(TrainingError, match=r"threshold` \(=1.5 5\) filtered 100.0% of(.|\n)*3 such steps"):
        run(settings(model_dir, output, prompts, *band))
    printed = capsys.readouterr()
    assert printed.err.count("next to nothing was learned") == 2 and "  ratio/mean 1" in printed.err
    assert "= w if 1.5 <= exp(mean of log w over the sample) <= 5 else 0" in printed.out
    assert [(e["step"], e["in_a_row"]) for e in events(output, "filtered")] == [(1, 1), (2, 2), (3, 3)]
    assert metrics(output, "train/grad_norm") == [0, 0, 0]
    assert [path.name for path in (output / "checkpoints").glob("step_*")] == ["step_000003"]


def groups(count: int) -> list[str]:
    """The ids of the groups of one epoch of so many prompts, sorted."""
    return sorted(f"0:{i}" for i in range(count))


@pytest.fixture(scope="module")
def run_with_failures(ray_session, model_dir, tmp_path_factory):
    """A run in which the rollouts of one prompt raise and those of another have no reward."""
    directory = tmp_path_factory.mktemp("failures")
    prompts = write_prompts(directory / "p.jsonl", 26, {5: "raise", 9: "nan"})
    more = ("--rollout.max_retries", "1", "--rollout.max_failure_rate", "0.5")
    run(settings(model_dir, directory / "out", prompts, *more))
    return directory / "out"


def test_failed_rollouts_are_never_trained_and_are_backfilled(run_with_failures):
    trained, lost = trained_groups(run_with_failures), events(run_with_failures, "group_discarded")
    assert len(trained) == len(set(trained)) == 24
    assert len(lost) == 2
    assert sorted([*trained, *(event["group"] for event in lost)]) == groups(26)
    assert len(metrics(run_with_failures, "train/loss")) == 6


@pytest.mark.parametrize(("name", "detail"), [
    ("RuntimeError", "the sandbox is gone"), ("reward_not_finite", "sevens.py:13) returned reward nan"),
])  # fmt: skip
def test_a_failure_is_retried_and_costs_its_group_alone(run_with_failures, name, detail):
    lost = [event for event in events(run_with_failures, "group_discarded") if event["reason"] == name]
    assert len(lost) == 1 and detail in lost[0]["detail"]
    assert sum(metrics(run_with_failures, f"faults/{name}")) == 8  # 4 rollouts x 2 attempts


def test_a_hanging_env_costs_its_group_alone(ray_session, model_dir, tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", 13, {5: "hang"})
    more = ("--rollout.max_retries", "0", "--rollout.timeout_s", "10", "--rollout.max_failure_rate", "0.5")
    run(settings(model_dir, tmp_path / "out", prompts, *more))
    (lost,) = events(tmp_path / "out", "group_discarded")
    assert lost["reason"] == "timeout" and "rollout.timeout_s (=10)" in lost["detail"]
    assert sorted([*trained_groups(tmp_path / "out"), lost["group"]]) == groups(13)


def test_too_many_failures_stop_the_run_with_the_reasons_and_it_can_go_on(ray_session, model_dir, tmp_path):
    output, bad = tmp_path / "out", {i: "raise" for i in range(40)}
    prompts = write_prompts(tmp_path / "p.jsonl", 40, bad)
    with pytest.raises(FailureRateError, match=r"max_failure_rate.*\n.*RuntimeError: .*the sandbox is gone.*sevens.py"):
        run(settings(model_dir, output, prompts))
    write_prompts(tmp_path / "p.jsonl", 40)  # the user mends the sandbox
    with pytest.warns(UserWarning, match="made with other labels: the prompts are the same"):
        run(settings(model_dir, output, prompts, "--ckpt.load_enable"))
    assert sorted(trained_groups(output)) == sorted(f"0:{i}" for i in range(40))  # what failed was not lost


def test_a_run_that_failed_before_its_first_batch_does_not_block_its_directory(ray_session, model_dir, tmp_path):
    output, bad = tmp_path / "out", {i: "raise" for i in range(40)}
    prompts = write_prompts(tmp_path / "p.jsonl", 40, bad)
    with pytest.raises(FailureRateError):
        run(settings(model_dir, output, prompts))
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step_000000"]
    write_prompts(tmp_path / "p.jsonl", 40)
    new = settings(model_dir, output, prompts, "--train.max_steps", "2")
    check_output_dir(new.ckpt)
    run(new)
    steps = [json.loads(line)["step"] for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2], "nothing of the run that failed is left"
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step_000002"]
    with pytest.raises(CheckpointError, match="holds a run"):
        check_output_dir(new.ckpt)


def test_a_runner_that_dies_is_replaced_and_its_groups_are_rolled_out_again(ray_session, model_dir, tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", 24, {3: f"die:{tmp_path / 'died'}"})
    run(settings(model_dir, tmp_path / "out", prompts))
    assert (tmp_path / "died").exists()
    assert len(set(trained_groups(tmp_path / "out"))) == 24


def test_resume_trains_every_prompt_once_and_moves_the_abandoned_steps(ray_session, model_dir, tmp_path):
    output, prompts = tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 40)
    run(settings(model_dir, output, prompts, "--train.max_steps", "6", "--ckpt.save_steps", "4",
                 "--ckpt.disable_final_save"))  # fmt: skip
    assert sorted(p.name for p in (output / "checkpoints").iterdir()) == ["step_000004"]
    run(settings(model_dir, output, prompts, "--ckpt.load_enable"))
    assert sorted(trained_groups(output)) == sorted(f"0:{i}" for i in range(40))
    steps = [json.loads(line)["step"] for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(11))
    assert events(output, "resumed")[0]["abandoned_steps"] == [5, 6]


def test_a_stall_inside_a_step_is_not_saved_as_if_it_were_between_two(ray_session, model_dir, tmp_path, monkeypatch):
    """The batch is trained and not published: a checkpoint here would hold it in the buffer, to be trained again."""

    async def too_slow(self, version):
        if version == 3:
            raise TrainingError("the policy ranks did not answer")
        return await publish(self, version)

    publish = Publisher.publish
    monkeypatch.setattr(Publisher, "publish", too_slow)
    with pytest.raises(TrainingError):
        run(settings(model_dir, tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 24)))
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_resume_with_settings_that_would_mix_up_the_prompts_is_refused(ray_session, model_dir, tmp_path):
    output, prompts = tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 24)
    run(settings(model_dir, output, prompts, "--train.max_steps", "2"))
    with pytest.raises(CheckpointError, match=r"'seed': 42.*'seed': 43.*repeat or skip"):
        run(settings(model_dir, output, prompts, "--ckpt.load_enable", "--train.seed", "43"))


@FULL  # tests/test_resume.py asks the same of runs that were killed and of runs that were stopped
def test_at_queue_size_zero_a_resumed_run_ends_with_the_same_bits(ray_session, model_dir, tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", 32)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = ("--train.async_queue_size", "0", "--ckpt.save_steps", "3")
    run(settings(model_dir, whole, prompts, *more))
    run(settings(model_dir, parts, prompts, *more, "--train.max_steps", "5", "--ckpt.disable_final_save"))
    run(settings(model_dir, parts, prompts, *more, "--ckpt.load_enable"))
    a, b = load_file(whole / "model.safetensors"), load_file(parts / "model.safetensors")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_publication_that_is_not_in_use_stops_the_run(ray_session, model_dir, tmp_path):
    import ray

    from tests.fakes import FakeEngine

    class Deaf(FakeEngine):
        """Acknowledges every tensor and loads none."""

        async def update_weights(self, info):
            model, self.model = self.model, torch.nn.Module()
            await super().update_weights(info)
            self.model = model

    config = settings(model_dir, tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 24))
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(drive(resolve(config), ray.remote(max_concurrency=1000)(Deaf)))
    error = raised.value
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, MoltError) and "received, not in use" in str(error)


@pytest.mark.parametrize("processes", [pytest.param(1, marks=FULL), 2])
def test_an_evaluation_of_the_exported_model_gives_the_number_of_the_run(ray_session, model_dir, tmp_path, processes):
    output, prompts = tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 12)
    count = ("--vllm.num_engines", str(processes), "--rollout.num_runners", str(processes))
    evaluation = ("--eval.dataset", prompts, "--eval.n_samples_per_prompt", "3", "--eval.max_new_tokens", "6")
    run(settings(model_dir, output, prompts, *count, *evaluation))
    (inside,) = events(output, "evaluation")
    config = settings(str(output), tmp_path / "nothing", "", *evaluation, "--eval.eval_only")
    found, seconds = asyncio.run(drive_evaluation(resolve_evaluation(config), FakeEngineWorker))
    outside = values(score(found))
    assert 0 < outside["eval/p/pass1"] < 1 and outside["eval/p/pass1_low"] < outside["eval/p/pass1_high"]
    assert outside == {name: value for name, value in inside.items() if name.startswith("eval/")}
    assert seconds > 0 and not (tmp_path / "nothing").exists()
