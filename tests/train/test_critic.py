"""The critic on one rank, and on two, against an independent computation: float64, one sequence at a time."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from molt.batch.plan import SampleTask
from molt.columns import NOT_GENERATED
from molt.config import AdamConfig, CriticConfig, FsdpConfig, TrainConfig
from molt.report import metrics as report
from molt.train.checkpoint import begin, commit
from molt.train.critic import Critic, CriticSettings
from tests.streams import sample_from
from tests.tiny import tiny_qwen3
from tests.train.ranks import alone, run_ranks, whole

CLIP = 0.05


def settings(path, *, packed=False, lr=1e-3, epochs=1):
    critic = CriticConfig(
        model_name_or_path=str(path), gradient_checkpoint="none", adam=AdamConfig(lr=lr), max_norm=0.0,
        value_clip=CLIP, max_epochs=epochs,
    )  # fmt: skip
    fsdp, train = FsdpConfig(device="cpu", packing_samples=packed), TrainConfig(seed=0)
    return CriticSettings(critic, fsdp, train, max_len=64, total_steps=10)


@pytest.fixture
def critic(tiny):
    def build(**arguments):
        return Critic(settings(tiny, **arguments), alone())

    yield build
    if dist.is_initialized():
        dist.destroy_process_group()


def make_samples(lengths=(9, 14, 6, 11)):
    """`samples[group][rollout][segment]`; tokens 2, 3 and those from 5 on are trained."""
    rng = np.random.default_rng(0)
    samples = {}
    for g, length in enumerate(lengths):
        versions = np.full(length, NOT_GENERATED, np.int32)
        versions[2:4], versions[5:] = 3, 5
        samples[g] = [
            [sample_from(rng.integers(3, 99, length).astype(np.int32), versions, np.zeros(length, np.float32))]
        ]
    return samples


def make_plan(samples, steps):
    plan = []
    for step in steps:
        trained = sum(int(samples[g][0][0].mask.sum()) for batch in step for g in batch)
        plan.append([[SampleTask((g, 0, 0), float(g), None, 1 / trained, 0.0) for g in batch] for batch in step])
    return plan


WHOLE = (((0, 1), (2, 3)),)


def make_returns(samples):
    rng = np.random.default_rng(1)
    drawn = {(g, 0, 0): rng.normal(size=len(rollouts[0][0].token_ids)) for g, rollouts in samples.items()}
    return {at: np.where(samples[at[0]][0][0].mask, values, 0).astype(np.float32) for at, values in drawn.items()}


def reference_values(decoder, head, ids):
    """float64 [T]: the head on the hidden state before token t; 0 for the first."""
    hidden = decoder(input_ids=torch.tensor(ids.astype(np.int64))[None], use_cache=False).last_hidden_state[0]
    return torch.cat([torch.zeros(1, dtype=torch.float64), (hidden[:-1] @ head.t())[:, 0]])


def reference_of(critic):
    decoder = tiny_qwen3().double().model
    return decoder, critic.model.head.weight.detach().double().clone().requires_grad_()


@pytest.mark.parametrize("packed", [False, True])
def test_values_loss_and_gradient_of_a_step(critic, packed):
    samples, ours = make_samples(), critic(packed=packed)
    plan, returns = make_plan(samples, WHOLE), make_returns(samples)
    decoder, head = reference_of(ours)
    loss, trained = 0.0, 0
    inferred = ours.infer(plan, samples)
    for at, values in inferred.items():
        sample = samples[at[0]][0][0]
        now = reference_values(decoder, head, sample.token_ids)
        np.testing.assert_allclose(values[sample.mask], now.detach().numpy()[sample.mask], atol=1e-5)
        assert not values[~sample.mask].any() and values.dtype == np.float32
        for t in np.flatnonzero(sample.mask):
            loss, trained = loss + 0.5 * (now[t] - float(returns[at][t])) ** 2, trained + 1  # V = V_old: no clip yet
    loss = loss / trained
    parameters = {"head": head, **dict(decoder.named_parameters())}
    grads = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))

    def compare(*_):
        for name, p in ours.model.named_parameters():
            expected = grads["head" if name == "head.weight" else name.removeprefix("decoder.")]
            assert torch.linalg.norm(p.grad.double() - expected) <= 2e-5 * torch.linalg.norm(expected) + 1e-10, name

    ours.optimizer.register_step_pre_hook(compare)
    metrics = ours.train(returns)
    assert metrics["train/value_loss"].total == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/value_clip_fraction"].count == trained == 28
    assert metrics.keys() == {
        "train/value_loss", "train/value_grad_norm", "train/value_lr", "train/value_clip_fraction",
        "train/explained_variance",
    }  # fmt: skip
    truth = np.concatenate([returns[at][samples[at[0]][0][0].mask] for at in inferred])
    guess = np.concatenate([inferred[at][samples[at[0]][0][0].mask] for at in inferred])
    expected = 1 - np.var(truth.astype(np.float64) - guess) / np.var(truth.astype(np.float64))
    assert metrics["train/explained_variance"].total == pytest.approx(expected, abs=1e-5)


def test_values_are_clipped_around_those_of_the_start(critic):
    samples, ours = make_samples(), critic(lr=3e-2, epochs=4)
    plan, returns = make_plan(samples, WHOLE), make_returns(samples)
    ours.infer(plan, samples)
    metrics = ours.train(returns)
    assert metrics["train/value_loss"].count == 4 and metrics["train/value_clip_fraction"].total > 0


def two_steps(critic, plan, samples, returns):
    before = [whole(p) for p in critic.model.parameters()]
    critic.infer(plan, samples)
    metrics = critic.train(returns)
    moved = [(whole(p) - b).abs().max().item() for p, b in zip(critic.model.parameters(), before, strict=True)]
    return metrics, max(moved)


def on_a_rank(mesh, path, plans, samples, returns):
    return two_steps(Critic(settings(path), mesh), plans[mesh.data_rank], samples, returns)


@pytest.mark.processes
@pytest.mark.parametrize("share", ["nothing of step 2", "nothing at all"])
def test_two_ranks_do_what_one_does(critic, tiny, tmp_path, share):
    samples = make_samples()
    returns, plan = make_returns(samples), make_plan(samples, (((0, 1), (2,)), ((3,),)))
    plans = [[[plan[0][0]], plan[1]], [[plan[0][1]], [[]]]]
    if share == "nothing at all":
        plans = [plan, [[[], []], [[]]]]
    one, moved = two_steps(critic(), plan, samples, returns)
    ranks = run_ranks(on_a_rank, 2, tmp_path, tiny, plans, samples, returns)
    merged = report.merge(metrics for metrics, _ in ranks)
    assert merged.keys() == one.keys()
    for name, metric in report.values(merged).items():
        assert metric == pytest.approx(report.values(one)[name], rel=1e-4, abs=1e-6), name
    assert [change for _, change in ranks] == pytest.approx([moved] * 2, rel=1e-3)


def state_of(critic):
    tensors = {name: p.detach().clone() for name, p in critic.model.named_parameters()}
    for name, p in critic.model.named_parameters():
        tensors |= {f"{name}/{key}": value.clone() for key, value in critic.optimizer.state[p].items()}
    return tensors, critic.scheduler.last_epoch


def test_a_resumed_critic_goes_on_bit_for_bit(critic, tmp_path):
    samples = make_samples()
    plan, returns = make_plan(samples, WHOLE), make_returns(samples)
    ours = critic()
    two_steps(ours, plan, samples, returns)
    aside = begin(tmp_path, 1)
    ours.save(aside, background=False)
    path = commit(aside)
    two_steps(ours, plan, samples, returns)
    expected = state_of(ours)
    resumed = critic(lr=1e-3)
    resumed.load(path)
    two_steps(resumed, plan, samples, returns)
    tensors, steps = state_of(resumed)
    assert steps == expected[1] == 2
    assert tensors.keys() == expected[0].keys()
    assert all(torch.equal(tensors[name], expected[0][name]) for name in tensors)
