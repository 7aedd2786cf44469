"""Whole runs over `FakeEngine` with what the advantages need beyond the policy: a critic, a reference, a filter."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from molt.algo.kl import adapt
from molt.algorithm import load_algorithm
from molt.cli.args import parse
from molt.config import RLConfig
from molt.errors import CheckpointError, ConfigError, ResourceError
from molt.roles import assign_ranks, roles
from tests.runs import events, metrics, run, settings, write_prompts

pytestmark = pytest.mark.ray
GAE = ["--algo.advantage.estimator", "gae", "--critic.adam.lr", "1e-2", "--critic.gradient_checkpoint", "none"]
QUEUE_0 = ["--train.async_queue_size", "0"]
EXAMPLES = Path(__file__).parent.parent / "examples" / "python" / "algorithms"


def by_step(output, name):
    lines = [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def critic_of(output, step, directory):
    """Every tensor of the critic in a checkpoint: weights and optimizer state."""
    whole = directory / f"{output.name}_{step}.pt"
    dcp_to_torch_save(output / "checkpoints" / f"step_{step:06d}" / "critic" / "model", whole)
    return torch.load(whole, weights_only=True)


@pytest.fixture(scope="module")
def gae_run(ray_session, model_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("gae")
    prompts = write_prompts(directory / "p.jsonl", 40)
    more = [*GAE, *QUEUE_0, "--actor.freezing_steps", "2", "--ckpt.save_steps", "4"]
    run(settings(model_dir, directory / "whole", prompts, *more))
    return directory, prompts, more


def test_the_critic_warms_up_alone_and_learns(gae_run):
    output = gae_run[0] / "whole"
    losses = metrics(output, "train/value_loss")
    assert len(losses) == 10 and sum(losses[-3:]) < sum(losses[:3]) / 2
    assert sorted(by_step(output, "train/loss")) == list(range(3, 11))  # the policy is frozen in two batches
    assert len(metrics(output, "train/explained_variance")) == 10
    assert [event["version"] for event in events(output, "publication")] == list(range(11))


def test_a_resumed_critic_ends_with_the_same_bits(gae_run, model_dir, tmp_path):
    directory, prompts, more = gae_run
    output = tmp_path / "resumed"
    run(settings(model_dir, output, prompts, *more, "--train.max_steps", "6"))
    run(settings(model_dir, output, prompts, *more, "--ckpt.load_enable"))
    for name in ("train/value_loss", "train/explained_variance", "train/loss", "rollout/reward"):
        assert metrics(output, name) == metrics(directory / "whole", name), name
    ours, whole = critic_of(output, 10, tmp_path), critic_of(directory / "whole", 10, tmp_path)
    assert ours.keys() == whole.keys() and any(name.startswith("optimizer/") for name in ours)
    assert all(torch.equal(ours[name], whole[name]) for name in ours)
    policies = [load_file(run_of / "model.safetensors") for run_of in (output, directory / "whole")]
    assert all(torch.equal(policies[0][name], policies[1][name]) for name in policies[0])


def test_each_model_may_have_its_own_number_of_ranks(ray_session, model_dir, tmp_path):
    """What one model says reaches the ranks of another that have other samples."""
    prompts, found = write_prompts(tmp_path / "p.jsonl", 16), {}
    more = [*GAE, *QUEUE_0, "--algo.kl.init_coef", "0.1", "--train.micro_batch_size", "3", "--train.batch_size", "8"]
    for name, ranks in {"one": (1, 1, 1), "several": (2, 1, 2)}.items():
        each = zip(("actor", "critic", "ref"), map(str, ranks), strict=True)
        counts = [flag for model, n in each for flag in (f"--{model}.num_gpus_per_node", n)]
        run(settings(model_dir, tmp_path / name, prompts, *more, *counts))
        found[name] = tmp_path / name
    for name in ("train/kl", "train/value_loss", "train/explained_variance", "train/loss", "train/grad_norm"):
        first, later = metrics(found["several"], name), metrics(found["one"], name)
        assert first[:2] == pytest.approx(later[:2], rel=1e-3, abs=1e-5), name


def test_a_policy_that_would_stay_frozen_is_refused(ray_session, model_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"`actor.freezing_steps` \(=4\) with 4 steps"):
        run(settings(model_dir, tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 16), *GAE,
                     "--actor.freezing_steps", "4"))  # fmt: skip


def test_a_checkpoint_without_a_critic_is_refused(ray_session, model_dir, tmp_path):
    output, prompts = tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 16)
    run(settings(model_dir, output, prompts, "--train.max_steps", "1"))
    with pytest.raises(CheckpointError, match="has no critic"):
        run(settings(model_dir, output, prompts, *GAE, "--ckpt.load_enable"))


def test_kl_to_a_frozen_model_adapts_its_coefficient_and_resumes_it(ray_session, model_dir, tmp_path):
    output, prompts = tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 32)
    more = [*QUEUE_0, "--algo.kl.init_coef", "0.2", "--algo.kl.use_loss", "--algo.kl.estimator", "k3",
            "--algo.kl.target", "1e-3", "--algo.kl.horizon", "100"]  # fmt: skip
    run(settings(model_dir, output, prompts, *more, "--train.max_steps", "4"))
    run(settings(model_dir, output, prompts, *more, "--ckpt.load_enable"))
    kl, coef = metrics(output, "train/kl"), metrics(output, "train/kl_coef")
    assert abs(kl[0]) < 1e-6 < 1e-4 < kl[-1]  # at first the policy is its reference
    expected = [0.2]
    for measured in kl[:-1]:  # 4 prompts x 4 rollouts a batch
        expected.append(adapt(expected[-1], measured, target=1e-3, horizon=100, rollouts=16))
    assert coef == pytest.approx(expected, rel=1e-9) and coef[1] < coef[0] < coef[-1]


@pytest.mark.full  # 36 steps; the formula is in tests/algo/test_advantage.py, a reference model in the test before
def test_distillation_nears_its_teacher_without_a_reward(ray_session, model_dir, tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", 96)
    run(settings(model_dir, tmp_path / "teacher", prompts, *QUEUE_0, "--train.max_steps", "12"))
    run(settings(model_dir, tmp_path / "student", write_prompts(tmp_path / "q.jsonl", 96), *QUEUE_0,
                 "--algo.advantage.estimator", "on_policy_distill",
                 "--ref.model_name_or_path", str(tmp_path / "teacher")))  # fmt: skip
    kl, reward = metrics(tmp_path / "student", "train/kl"), metrics(tmp_path / "student", "rollout/reward")
    assert sum(kl[-4:]) < 0.5 * sum(kl[:4])
    assert sum(reward[-4:]) > sum(reward[:4])  # sevens come from the teacher


def test_filtered_groups_are_replaced_and_counted(ray_session, model_dir, tmp_path, capsys):
    output = tmp_path / "out"
    run(settings(model_dir, output, write_prompts(tmp_path / "p.jsonl", 50), *QUEUE_0, "--actor.adam.lr", "1e-4",
                 "--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_range", "0", "0.1"))  # fmt: skip
    kept = {}
    for path in (output / "run" / "rollouts").glob("step_*.parquet"):
        for row in pq.read_table(path, columns=["group_id", "score"]).to_pylist():
            kept.setdefault(row["group_id"], []).append(row["score"])
    # 4 x 4 tokens: one seven in a group is a mean of 1/16, two are 1/8, above the range.
    assert kept and all(sum(scores) / 4 == 1 / 16 and len(scores) == 4 for scores in kept.values())
    steps = len(metrics(output, "train/loss"))
    assert steps == -(-len(kept) // 4) and len(events(output, "small_batch")) == (len(kept) % 4 > 0)
    assert f"{50 - len(kept)} of 50 groups were filtered" in capsys.readouterr().err
    assert metrics(output, "rollout/score") == [1 / 16] * steps
    seen = zip(*(metrics(output, f"rollout/{name}") for name in ("filtered", "all_fail", "all_pass")), strict=True)
    assert all(filtered == pytest.approx(fail + passed) for filtered, fail, passed in seen)
    judged, filtered = (sum(metrics(output, f"rollout/{name}_count")) for name in ("judged", "filtered"))
    assert judged <= 50 and judged - filtered == len(kept)


def test_a_filter_that_leaves_nothing_ends_the_run_and_says_so(ray_session, model_dir, tmp_path, capsys):
    output = tmp_path / "out"
    run(settings(model_dir, output, write_prompts(tmp_path / "p.jsonl", 12),
                 "--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_range", "2", "3"))  # fmt: skip
    assert not metrics(output, "train/loss")
    assert "12 of 12 groups were filtered" in capsys.readouterr().err


@pytest.mark.parametrize("plugin", [
    ["--algo.advantage.estimator", f"{EXAMPLES}/group_median.py:group_median"],
    ["--algo.loss", f"{EXAMPLES}/asymmetric_reinforce.py:asymmetric_reinforce"],
])  # fmt: skip
def test_a_plug_in_works_by_naming_it(ray_session, model_dir, tmp_path, plugin):
    output = tmp_path / "out"
    run(settings(model_dir, output, write_prompts(tmp_path / "p.jsonl", 96), *QUEUE_0, *plugin))
    rewards = metrics(output, "rollout/reward")
    assert sum(rewards[-6:]) > sum(rewards[:6]) + 0.3


def config(*flags):
    return parse(RLConfig, flags, prog="test")


def ranks(config, gpus):
    needed = roles(config, load_algorithm(config.algo, config.actor))
    engine_gpus = config.vllm.num_engines * config.vllm.tensor_parallel_size
    return assign_ranks(needed, gpus=gpus, engine_gpus=engine_gpus, colocated=config.train.colocate_fsdp_models)


def test_only_what_the_advantages_need_is_started():
    assert ranks(config(), 0) == {"policy": 1}
    assert ranks(config("--algo.kl.init_coef", "0"), 0) == {"policy": 1}
    assert ranks(config("--algo.kl.init_coef", "0.1", "--algo.kl.ref", "rollout"), 0) == {"policy": 1}
    assert ranks(config("--algo.kl.init_coef", "0.1"), 0) == {"policy": 1, "reference": 1}
    assert ranks(config(*GAE, "--critic.num_gpus_per_node", "2"), 0) == {"policy": 1, "critic": 2}


def test_gpus_are_counted_together():
    both = [*GAE, "--algo.kl.init_coef", "0.1"]
    # One engine, one reference, one critic: 8 - 3 are left for the policy.
    assert ranks(config(*both), 8) == {"policy": 5, "reference": 1, "critic": 1}
    assert ranks(config(*both, "--train.colocate_fsdp_models"), 8) == dict.fromkeys(
        ("policy", "reference", "critic"), 7
    )
    with pytest.raises(
        ResourceError, match=r"6 policy ranks .* 1 reference ranks \+ 1 critic ranks .* = 9; present: 8"
    ):
        ranks(config(*both, "--actor.num_gpus_per_node", "6"), 8)
