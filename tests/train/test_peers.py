"""Peers, the ranks that differ along tp and cp alone, do together what one rank does, and count once."""

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from molt.batch.plan import Place, SampleTask
from molt.config import AdvantageConfig, CkptConfig, FsdpConfig, KlConfig, ModelConfig
from molt.config_sft import SftConfig, SftDataConfig, SftTrainConfig
from molt.parallel.shape import ALL_AXES, MeshShape
from molt.report import metrics as report
from molt.train.checkpoint import begin, commit
from molt.train.critic import Critic
from molt.train.exchange import routes
from molt.train.inference import tasks_of
from molt.train.policy import Policy
from molt.train.policy_worker import PolicyRanks
from molt.train.rank_worker import Ranks
from molt.train.reference import Reference, ReferenceSettings
from molt.train.sft import SftRun, Termination
from molt.types import Metric
from tests.train import test_critic as of_critic
from tests.train import test_policy as of_policy
from tests.train.ranks import CPU, alone, free_port, meet, run_ranks, whole
from tests.train.test_objective import MAX_LEN, plans, ragged

TWO = "two ranks"
LAYOUTS = {
    "tp": MeshShape(dp_shard=2, tp=2),
    "cp": MeshShape(dp_shard=2, cp=2),
    "copies with tp": MeshShape(dp_replicate=2, tp=2),
}
"""Each has two data-parallel ranks with two peers."""
KL_COEF = 0.3


async def answer(value):
    return value


class Peer:
    """A rank as its process answers: metrics of one token, arrays with its name."""

    def __init__(self, rank):
        self.rank = rank
        self.plans = []

    def _planned(self, plan, *others):
        self.plans.append(plan)
        return answer({"n": Metric(float(self.rank), 1.0)}), f"arrays of rank {self.rank}"

    @property
    def infer(self):
        return SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._planned))

    prepare = infer

    @property
    def train(self):
        return SimpleNamespace(remote=lambda: answer({"n": Metric(float(self.rank), 1.0)}))


@pytest.mark.parametrize("shape", LAYOUTS.values(), ids=LAYOUTS)
def test_peers_get_the_plan_of_their_data_parallel_rank_and_the_first_answers(shape):
    plans = [[[[SampleTask(Place(group, 0, 0), 0.0, 0.0, 1.0)]]] for group in range(2)]
    to_critic = routes(plans, plans)

    async def main():
        ranks = PolicyRanks(Peer, shape, name="policy", timeout_s=5)
        assert [peer.rank for peer in ranks.workers] == [0, 1, 2, 3]
        arrays = await ranks.infer(plans, to_critic)
        prepared, returns = await ranks.prepare(plans, {}, to_critic, 0, 0.0)
        return ranks, arrays, returns, prepared, await ranks.train()

    ranks, arrays, returns, prepared, trained = asyncio.run(main())
    for peer in ranks.workers:
        assert peer.plans == [plans[peer.rank // 2]] * 2
    assert arrays == returns == {0: ["arrays of rank 0"], 1: ["arrays of rank 2"]}
    assert prepared == trained == {"n": Metric(0.0 + 2.0, 2.0)}


def test_a_plan_for_another_number_of_ranks_is_an_error():
    ranks = Ranks(Peer, LAYOUTS["tp"], name="policy", timeout_s=5)
    with pytest.raises(AssertionError, match="planned for the data-parallel ranks"):
        asyncio.run(ranks.infer([[]] * 4, []))


def sft_config(path, rows):
    return SftConfig(
        model=ModelConfig(str(path), "none"),
        fsdp=FsdpConfig(device="cpu"),
        data=SftDataConfig(dataset=str(rows), output_key="output", max_len=64),
        train=SftTrainConfig(micro_batch_size=2, batch_size=5),
        ckpt=CkptConfig(output_dir=rows.parent / "sft"),
    )


def sft(mesh, path, rows):
    """Micro-batches and metrics of two steps, and the loss of held-out rows."""
    run = SftRun(sft_config(path, rows), mesh, CPU)
    micro_batches = run._micro_batches(run._batch(1))
    planned = [made and made.batch.token_ids.tolist() for made in micro_batches]
    steps = []
    for step in (1, 2):
        metrics = run._step(step)
        del metrics["perf/tokens_per_s"]
        steps.append(metrics)
    run.held_out = run.conversations[:3]
    return planned, steps, run.evaluate()


def policy_settings(path):
    """GAE whitens, the KL needs a reference, the second epoch needs old log-probs, and every gradient is clipped."""
    made = of_policy.settings(
        path,
        advantage=AdvantageConfig("gae", lam=0.9, gamma=0.98),
        kl=KlConfig(init_coef=KL_COEF, estimator="k3", use_loss=True),
        epochs=2,
    )
    return replace(made, actor=replace(made.actor, max_norm=0.01))


def weights(model):
    return {name: whole(p) for name, p in model.named_parameters()}


def train(mesh, path):
    """A training batch of policy, critic and reference: what each rank knows after it."""
    samples, groups, rewards = ragged()
    layout = {"aggregation": "token-mean", "size": 2, "packed": True, "ranks": mesh.data_ranks}
    plan = plans(groups, rewards, "gae", **layout)[mesh.data_rank]
    policy = Policy(policy_settings(path), mesh)
    critic = Critic(of_critic.settings(path), mesh)
    reference = Reference(ReferenceSettings(str(path), policy.settings.fsdp, of_policy.TEMPERATURE, MAX_LEN), mesh)
    inferred = {"ref_logprobs": reference.infer(plan, samples), "values": critic.infer(plan, samples)}

    gradients = {}

    def keep_gradients(*_):
        """Those of the first step: later ones are at weights that differ by the rounding of the first."""
        if not gradients:
            gradients.update({name: whole(p.grad) for name, p in policy.model.named_parameters()})

    hook = policy.optimizer.register_step_pre_hook(keep_gradients)
    prepared, returns = policy.prepare(plan, samples, inferred, 6, KL_COEF)
    whitened = []
    for micro_batch in policy.micro_batches(plan[0]):
        if micro_batch is not None:
            whitened.append(micro_batch.advantages.flatten())
    metrics = report.merge([prepared, policy.train(), critic.train(returns)])
    hook.remove()
    found = {
        "plan": list(tasks_of(plan)),
        "metrics": metrics,
        "whitened": torch.cat(whitened),
        "gradients": gradients,
        "weights": weights(policy.model),
        "values": weights(critic.model),
    }
    return policy, plan, samples, inferred, found


def saved(mesh, policy, directory):
    """A background save; the generator of each data-parallel rank is somewhere else."""
    torch.manual_seed(100 + mesh.data_rank)
    if mesh.is_writer:
        begin(directory, 1)
    mesh.barrier(*ALL_AXES)
    aside = directory / "step_000001.tmp"
    policy.save(aside, background=True)
    policy.written(aside)
    mesh.barrier(*ALL_AXES)
    if mesh.is_writer:
        commit(aside)
    mesh.barrier(*ALL_AXES)
    return directory / "step_000001"


def with_nan(model, inputs, output):
    return output._replace(logprobs=output.logprobs * math.nan)


def with_a_fault(mesh, policy, plan, samples, inferred):
    """A batch in which the log-probs of the last rank alone are NaN. Metrics, evidence, whether no weight moved."""
    before = weights(policy.model)
    policy.prepare(plan, samples, inferred, 6, KL_COEF)
    if mesh.rank == mesh.size - 1:
        policy.model.register_forward_hook(
            lambda model, inputs, found: found._replace(logprobs=found.logprobs * math.nan)
        )
    metrics = policy.train()
    unmoved = all(torch.equal(before[name], now) for name, now in weights(policy.model).items())
    return metrics, policy.evidence(), unmoved


def signalled_last(mesh):
    """Whether any rank was signalled, where the last one was."""
    termination = Termination()
    termination.signalled = mesh.rank == mesh.size - 1
    return termination.anywhere(mesh)


def on_a_rank(four, path, rows, directory, ports):
    """The same work on two ranks, twice side by side, and in each layout of four: what this rank found, by layout."""
    rank = four.rank
    found = {}
    mesh = meet(rank % 2, MeshShape(dp_shard=2), ports[rank // 2])
    *_, found[TWO] = train(mesh, path)
    found[TWO]["sft"] = sft(mesh, path, rows)

    for port, (name, shape) in zip(ports[2:], LAYOUTS.items(), strict=True):
        mesh = meet(rank, shape, port)
        policy, plan, samples, inferred, found[name] = train(mesh, path)
        found[name]["sft"] = sft(mesh, path, rows)
        checkpoint = saved(mesh, policy, directory / name)
        found[name]["fault"] = with_a_fault(mesh, policy, plan, samples, inferred)
        policy.load(checkpoint)
        found[name]["loaded"] = weights(policy.model), torch.rand(2).tolist()
        found[name]["signalled"] = signalled_last(mesh)
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("peers")


@pytest.fixture(scope="module")
def ranks(tiny, directory):
    """What each of four ranks found: one start for all tests below."""
    rows = directory / "rows.jsonl"
    words = ["abc", "d", "bcda", "aabb", "cd", "dacb", "b", "ccc", "ab", "bca"]
    rows.write_text("".join(f'{{"input": "{word}", "output": "{word}"}}\n' for word in words))
    ports = [free_port() for _ in range(2 + len(LAYOUTS))]
    return run_ranks(on_a_rank, 4, directory, tiny, rows, directory, ports, limit_s=180)


def expected_of(ranks, name, rank):
    """What the rank of the two-rank run found that has the samples of `rank`."""
    return ranks[LAYOUTS[name].data_rank(rank)][TWO]


peers = pytest.mark.parametrize("name", LAYOUTS)
EVERY_RANK = range(4)


@pytest.mark.processes
@peers
def test_peers_have_one_plan_and_it_is_that_of_two_ranks(ranks, name):
    for rank in EVERY_RANK:
        found, expected = ranks[rank][name], expected_of(ranks, name, rank)
        assert found["plan"] == expected["plan"] != []
        assert found["sft"][0] == expected["sft"][0] != []
    assert ranks[0][TWO]["plan"] != ranks[1][TWO]["plan"] and ranks[0][TWO]["sft"][0] != ranks[1][TWO]["sft"][0]


@pytest.mark.processes
@peers
def test_metrics_are_those_of_two_ranks(ranks, name):
    """Losses, norms, KL, entropy, ratios, staleness, and the critic's; peers say the same, and count once."""
    shape = LAYOUTS[name]
    first_peers = [ranks[rank][name]["metrics"] for rank in EVERY_RANK if shape.is_first_peer(rank)]
    merged = report.merge(first_peers)
    expected = report.merge(ranks[rank][TWO]["metrics"] for rank in (0, 1))
    assert merged.keys() == expected.keys() > {"train/loss", "train/grad_norm", "train/kl", "train/value_grad_norm"}
    for metric_name, metric in expected.items():
        assert merged[metric_name].count == metric.count, metric_name
        assert merged[metric_name].total == pytest.approx(metric.total, rel=1e-6, abs=1e-6), metric_name
    for rank in EVERY_RANK:
        first = ranks[rank - rank % shape.peers][name]["metrics"]
        assert report.values(ranks[rank][name]["metrics"]) == pytest.approx(report.values(first), rel=1e-6, abs=1e-6)


@pytest.mark.processes
@peers
def test_whitening_gradients_and_weights_are_those_of_two_ranks(ranks, name):
    for rank in EVERY_RANK:
        found, expected = ranks[rank][name], expected_of(ranks, name, rank)
        torch.testing.assert_close(found["whitened"], expected["whitened"], rtol=1e-6, atol=1e-6)
        for parameter, gradient in expected["gradients"].items():
            gap = torch.linalg.norm(found["gradients"][parameter] - gradient)
            assert gap <= 1e-6 * torch.linalg.norm(gradient), parameter
        for kind in ("weights", "values"):
            for parameter, value in expected[kind].items():
                torch.testing.assert_close(found[kind][parameter], value, rtol=0, atol=1e-6)


@pytest.mark.processes
@peers
def test_sft_is_that_of_two_ranks(ranks, name):
    for rank in EVERY_RANK:
        _, steps, held_out = ranks[rank][name]["sft"]
        _, expected_steps, expected_held_out = expected_of(ranks, name, rank)["sft"]
        for step, expected in zip(steps, expected_steps, strict=True):
            assert step == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert held_out == pytest.approx(expected_held_out, rel=1e-6)


@pytest.mark.processes
@peers
def test_every_rank_skips_a_step_that_one_peer_cannot_take(ranks, name):
    for rank in EVERY_RANK:
        metrics, evidence, unmoved = ranks[rank][name]["fault"]
        assert unmoved and [trip["reason"] for trip in evidence] == ["nonfinite"] * 2  # one for each epoch
        assert metrics.get("train/skipped_count", Metric(0.0)).total == (2.0 if rank == 0 else 0.0)


@pytest.mark.processes
@peers
def test_a_signal_to_one_peer_reaches_every_rank(ranks, name):
    assert all(ranks[rank][name]["signalled"] for rank in EVERY_RANK)


@pytest.mark.processes
@peers
def test_a_checkpoint_has_each_tensor_once_and_a_random_state_for_each_data_parallel_rank(ranks, name, tiny, directory):
    path = directory / name / "step_000001"
    assert sorted(file.name for file in path.glob("rng_*")) == ["rng_00000.pt", "rng_00001.pt"]
    for rank in EVERY_RANK:
        loaded, drawn = ranks[rank][name]["loaded"]
        for parameter, value in ranks[rank][name]["weights"].items():
            assert torch.equal(loaded[parameter], value), parameter
        torch.manual_seed(100 + LAYOUTS[name].data_rank(rank))
        assert drawn == torch.rand(2).tolist()

    mesh = alone()
    policy = Policy(policy_settings(tiny), mesh)
    policy.load(path)  # one rank takes over
    for parameter, value in ranks[0][name]["weights"].items():
        assert torch.equal(whole(dict(policy.model.named_parameters())[parameter]), value), parameter
    mesh.close()
