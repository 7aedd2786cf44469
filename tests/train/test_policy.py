"""The policy on one rank against an independent computation: float64, one sequence at a time, full softmax."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from molt.batch.collate import gather
from molt.batch.plan import SampleTask
from molt.columns import NOT_GENERATED, Column, candidate_columns, token_columns
from molt.config import ActorConfig, AdamConfig, AdvantageConfig, AlgoConfig, FsdpConfig, KlConfig, TrainConfig
from molt.errors import TrainingError
from molt.report import metrics as report
from molt.train.inference import tasks_of
from molt.train.policy import Policy, PolicySettings
from molt.types import Sample
from tests.streams import sample_from
from tests.tiny import END_ID, PAD_ID, char_tokenizer, tiny_qwen3
from tests.train.ranks import alone, run_ranks, whole

TEMPERATURE = 0.8
LOW, HIGH = 0.2, 0.3


def settings(path, *, advantage=None, packed=False, lr=1e-3, epochs=1, kl=None, **actor):
    return PolicySettings(
        actor=ActorConfig(
            model_name_or_path=str(path),
            gradient_checkpoint="none",
            adam=AdamConfig(lr=lr),
            max_norm=0.0,
            **{"eps_clip_low_high": (LOW, HIGH)} | actor,
        ),
        fsdp=FsdpConfig(device="cpu", packing_samples=packed),
        algo=AlgoConfig(advantage or AdvantageConfig(estimator="grpo"), kl or KlConfig()),
        train=TrainConfig(max_epochs=epochs, seed=0),
        temperature=TEMPERATURE,
        max_len=64,
        total_steps=10,
        engine_dtype=torch.float32,
    )


@pytest.fixture
def policy(tiny):
    """Builds policies of this process alone, each from the same weights."""

    def build(**arguments):
        return Policy(settings(tiny, **arguments), alone())

    yield build
    if dist.is_initialized():
        dist.destroy_process_group()


def reference_model():
    return tiny_qwen3().double()


def logprobs_of(model, ids):
    """float64 [T], entry t is log p(token t | before) at the temperature; 0 for the first."""
    ids = torch.tensor(np.asarray(ids, np.int64))
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE
    return torch.cat([torch.zeros(1), logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]])


GAP = 0.9  # how far, in nats, the engine's log-probs may be from the trainer's here


def make_samples(lengths=(9, 14, 6, 11), seed=0):
    """Two turns each, behaviour log-probs around those of the reference, versions 3 and 5; `samples[g][r][s]`."""
    rng, model, samples = np.random.default_rng(seed), reference_model(), []
    for length in lengths:
        ids = rng.integers(3, 99, length).astype(np.int32)
        versions = np.full(length, NOT_GENERATED, np.int32)
        versions[2:4], versions[5:] = 3, 5
        with torch.no_grad():
            ours = logprobs_of(model, ids).numpy()
        engine = ours + rng.uniform(-GAP, GAP, length)
        samples.append(sample_from(ids, versions, np.where(versions >= 0, engine, 0).astype(np.float32)))
    return [[[samples[0]], [samples[1]]], [[samples[2]], [samples[3]]]]


ADVANTAGE = {(0, 0): 0.7, (0, 1): -1.1, (1, 0): 0.4, (1, 1): -0.2}
REWARD = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 2.0, (1, 1): -1.0}


def make_plan(samples, steps=(((0, 1), (2, 3)),)):
    """`steps` of micro-batches of sample numbers; token-mean weights within each step."""
    where = [(g, r) for g, rollouts in enumerate(samples) for r in range(len(rollouts))]
    plan = []
    for step in steps:
        trained = sum(int(samples[g][r][0].mask.sum()) for batch in step for g, r in (where[i] for i in batch))
        plan.append([[_task(where[i], 1 / trained) for i in batch] for batch in step])
    return plan


def _task(at, weight):
    return SampleTask((*at, 0), reward=REWARD[at], advantage=ADVANTAGE[at], weight=weight, share=1 / 4)


def train(policy, plan, samples, inferred=None, kl_coef=0.0):
    """One training batch at version 6; the metrics of both calls."""
    prepared, _ = policy.prepare(plan, samples, inferred or {}, 6, kl_coef)
    return report.merge([prepared, policy.train()])


def spread(policy, plan, samples):
    """Advantages by sample, as the loss gets them."""
    policy.prepare(plan, samples, {}, 6, 0.0)
    batches = [(tasks, m) for planned in plan for tasks, m in zip(planned, policy.micro_batches(planned), strict=True)]
    return {t.at: v for tasks, m in batches for t, v in zip(tasks, gather(m.batch, m.advantages), strict=True)}


COEFFICIENT = {
    "mask": lambda w, low, high: w if low <= w <= high else 0.0,
    "clip": lambda w, low, high: min(max(w, low), high),
    "trunc": lambda w, low, high: min(w, high),
}


def whole_sample(ws, level, band):
    """1 or 0: what levels seq and geo multiply the ratios of a sample by."""
    statistic = np.prod(ws) if level == "seq" else np.prod(ws) ** (1 / len(ws))
    return float(band[0] <= statistic <= band[1])


def expected_loss(model, start, samples, step, mode=None, band=(0.0, 0.0), level="token"):
    """`1/N sum_t -min(r A, clip(r) A) c`, token by token. `start`: the model whose log-probs are `old`."""
    total, filtered = 0.0, 0
    for task in (task for batch in step for task in batch):
        sample = samples[task.at[0]][task.at[1]][0]
        now = logprobs_of(model, sample.token_ids)
        with torch.no_grad():
            old = now.detach() if start is None else logprobs_of(start, sample.token_ids)
        trained = np.flatnonzero(sample.versions >= 0)
        ws = {t: float(np.exp(float(old[t]) - float(sample.logprobs[t]))) for t in trained}
        for t in trained:
            ratio, a = torch.exp(now[t] - old[t]), task.advantage
            loss = -torch.minimum(ratio * a, ratio.clamp(1 - LOW, 1 + HIGH) * a)
            w = ws[t]
            c = COEFFICIENT[mode](w, *band) if mode else 1.0
            if level in ("seq", "geo"):
                c = w * whole_sample(list(ws.values()), level, band)
            filtered += c != w
            total = total + task.weight * loss * c
    return total, filtered


def assert_same_gradients(policy, loss, reference):
    grads = torch.autograd.grad(loss, list(reference.parameters()))
    names = [name for name, _ in reference.named_parameters()]
    ours = dict(policy.model.causal_lm.named_parameters())
    for name, expected in zip(names, grads, strict=True):
        gap = torch.linalg.norm(ours[name].grad.double() - expected)
        assert gap <= 2e-5 * torch.linalg.norm(expected) + 1e-10, name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("level", "mode", "band"),
    [
        ("off", None, None),
        ("token", "mask", (0.7, 1.5)),
        ("token", "clip", (0.8, 1.2)),
        ("token", "trunc", (0.5, 1.1)),
        ("seq", "mask", (0.3, 3.0)),
        ("geo", "mask", (0.9, 1.1)),
    ],
)
def test_loss_and_gradient_of_a_step(policy, level, mode, band, packed):
    chosen = {"is_correction_mode": mode, "is_correction_threshold": band} if mode else {}
    ours = policy(advantage=AdvantageConfig(estimator="grpo", is_correction_level=level, **chosen), packed=packed)
    samples = make_samples()
    plan = make_plan(samples)
    reference = reference_model()
    loss, filtered = expected_loss(reference, None, samples, plan[0], mode, band, level)
    ours.optimizer.register_step_pre_hook(lambda *_: assert_same_gradients(ours, loss, reference))
    metrics = train(ours, plan, samples)
    assert metrics["train/loss"].total == pytest.approx(loss.item(), abs=1e-6)
    # 9, 14, 6 and 11 tokens, of which 3 prompt and observation: 6 + 11 + 3 + 8 = 28 are trained.
    assert metrics["train/entropy"].count == 28
    assert metrics["train/clip_fraction"].total == 0  # r = 1 in the first step
    if mode:
        assert 0 < metrics["ratio/filtered_fraction"].total == filtered < 28
        assert metrics["ratio/filtered_fraction"].count == 28
    else:
        assert "ratio/filtered_fraction" not in metrics


def with_candidates(samples, k, seed=3):
    """The same samples with the k likeliest tokens of some sampler at each generated token; its log-probs `[T, V]`."""
    rng = np.random.default_rng(seed)
    columns = candidate_columns(k)
    made, samplers = [], {}
    for g, rollouts in enumerate(samples):
        made.append([])
        for r, (sample,) in enumerate(rollouts):
            ours = log_distributions(reference_model(), sample.token_ids).detach().numpy()
            log_q = np.log(softmax(ours + rng.uniform(-GAP, GAP, ours.shape)))
            ids = np.argsort(-log_q, axis=1)[:, :k]
            ids[~sample.mask] = 0
            candidates = np.where(sample.mask[:, None], np.take_along_axis(log_q, ids, 1), 0)
            sampled = np.where(sample.mask, log_q[np.arange(len(ids)), sample.token_ids], 0)
            tokens = token_columns(sample.token_ids, sample.versions, sampled)
            tokens = tokens.with_column(columns.ids, ids).with_column(columns.logprobs, candidates)
            made[-1].append([Sample(tokens)])
            samplers[g, r] = log_q
    return made, samplers


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def log_distributions(model, ids):
    """float64 [T, V], row t the log-probs in the place of token t, at the temperature; 0 for the first."""
    logits = model(input_ids=torch.tensor(np.asarray(ids, np.int64))[None], use_cache=False).logits[0, :-1]
    logp = (logits / TEMPERATURE).log_softmax(-1)
    return torch.cat([torch.zeros(1, logp.shape[1]), logp])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("level", ["off", "token"])
def test_loss_and_gradient_of_score_centering(policy, level, packed):
    """Against the formula token by token, in float64, with all the probabilities at hand."""
    k, high = 4, 1.2
    advantage = AdvantageConfig(
        estimator="grpo", is_correction_level=level, is_correction_mode="trunc",
        is_correction_threshold=(0.0, high), score_centering_top_k=k,
    )  # fmt: skip
    ours = policy(advantage=advantage, packed=packed)
    samples, samplers = with_candidates(make_samples(), k)
    plan = make_plan(samples)

    def f(ratio):
        return min(ratio, high) if level == "token" else 1.0

    reference, loss = reference_model(), 0.0
    for task in tasks_of(plan):
        sample = samples[task.at[0]][task.at[1]][0]
        logp = log_distributions(reference, sample.token_ids)
        for t in np.flatnonzero(sample.mask):
            p, q = logp[t].detach().exp().numpy(), np.exp(samplers[task.at[:2]][t])
            held = np.argsort(-q)[:k]
            rho = (1 - q[held].sum()) / (1 - p[held].sum())
            alpha = rho * f(1 / rho)
            y = sample.token_ids[t]
            center = sum((q[v] * f(p[v] / q[v]) - alpha * p[v]) * logp[t, v] for v in held)
            loss = loss - task.weight * task.advantage * (f(p[y] / q[y]) * logp[t, y] - center)
    ours.optimizer.register_step_pre_hook(lambda *_: assert_same_gradients(ours, loss, reference))
    metrics = train(ours, plan, samples)
    assert metrics["train/loss"].total == pytest.approx(loss.item(), abs=1e-5)
    assert "train/clip_fraction" not in metrics and metrics["ratio/mean"].count == 28


def test_samples_without_candidates_are_refused_and_not_taken_for_certain(policy):
    samples, _ = with_candidates(make_samples(), 3)
    advantage = AdvantageConfig(estimator="grpo", score_centering_top_k=4)
    with pytest.raises(TrainingError, match=r"score_centering_top_k` \(=4\), but the samples of group 0"):
        train(policy(advantage=advantage), make_plan(samples), samples)


def test_ratio_metrics_by_hand(policy):
    samples = make_samples()
    metrics = train(policy(), make_plan(samples), samples)
    model, gaps = reference_model(), []
    for sample in (segments[0] for rollouts in samples for segments in rollouts):
        with torch.no_grad():
            gap = logprobs_of(model, sample.token_ids).numpy() - sample.logprobs
        gaps.append(gap[sample.mask])
    gaps = np.concatenate(gaps)
    value = {name: m.total / m.count for name, m in metrics.items() if name.startswith("ratio/log_abs_mean")}
    assert value["ratio/log_abs_mean"] == pytest.approx(np.abs(gaps).mean(), rel=1e-5)
    assert metrics["ratio/log_abs_max"].total == pytest.approx(np.abs(gaps).max(), rel=1e-5)
    assert metrics["ratio/mean"].total / metrics["ratio/mean"].count == pytest.approx(np.exp(gaps).mean(), rel=1e-5)


def test_entropy_is_that_of_the_scaled_distribution_at_the_trained_tokens(policy):
    samples = make_samples()
    metrics = train(policy(), make_plan(samples), samples)
    model, total = reference_model(), 0.0
    for sample in (segments[0] for rollouts in samples for segments in rollouts):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(sample.token_ids[None].astype(np.int64))).logits[0, :-1]
        entropy = torch.distributions.Categorical(logits=logits / TEMPERATURE).entropy()
        total += float(entropy[torch.tensor(sample.mask[1:])].sum())
    assert metrics["train/entropy"].total == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(("epochs", "steps"), [(1, (((0, 1),), ((2,), (3,)))), (2, (((0, 1, 2, 3),),))])
def test_old_is_the_policy_that_the_batch_started_with(policy, epochs, steps):
    """The second step starts from moved weights; its `old` are still those before the first."""
    masked = AdvantageConfig(estimator="grpo", is_correction_mode="mask", is_correction_threshold=(0.7, 1.5))
    samples = make_samples()
    plan = make_plan(samples, steps)
    ours = policy(advantage=masked, lr=3e-2, epochs=epochs)
    losses, start = [], reference_model()
    moved = reference_model()

    def before_step(*_):
        """The independent loss and gradient at the weights of this very step."""
        weights = dict(ours.model.causal_lm.named_parameters())
        moved.load_state_dict({name: p.detach().double() for name, p in weights.items()}, strict=False)
        number = len(losses)
        loss, _ = expected_loss(moved, start, samples, plan[number % len(plan)], "mask", (0.7, 1.5))
        assert_same_gradients(ours, loss, moved)
        losses.append(loss.item())

    ours.optimizer.register_step_pre_hook(before_step)
    metrics = train(ours, plan, samples)
    assert len(losses) == 2
    assert metrics["train/loss"].total == pytest.approx(sum(losses), abs=1e-6) and metrics["train/loss"].count == 2
    assert metrics["train/clip_fraction"].total > 0  # the weights really moved in between


@pytest.mark.parametrize(("epochs", "steps", "forwards"), [
    (1, (((0, 1), (2, 3)),), 2),  # one step: old is current
    (1, (((0, 1), (2,)), ((3,),)), 3 + 1),  # the second step alone needs old log-probs
    (2, (((0, 1), (2,)), ((3,),)), 6 + 3),  # in the second epoch every step does
])  # fmt: skip
def test_old_logprobs_are_computed_only_where_the_weights_have_moved(policy, epochs, steps, forwards):
    samples, ours, done = make_samples(), policy(epochs=epochs), []
    ours.model.register_forward_hook(lambda *_: done.append(1))
    train(ours, make_plan(samples, steps), samples)
    assert len(done) == forwards


def test_reinforce_is_whitened_over_the_whole_training_batch_and_not_per_step(policy):
    samples = make_samples()
    plan = make_plan(samples, (((0, 1),), ((2, 3),)))
    # A token estimator gets no advantage of the rollout, and reads the reward.
    plan = [[[replace(task, advantage=None) for task in batch] for batch in step] for step in plan]
    ours = policy(advantage=AdvantageConfig(estimator="reinforce", gamma=1.0))
    found = spread(ours, plan, samples)
    # gamma 1: every token of a rollout has its reward; 6, 11, 3, 8 tokens of 1, 0, 2, -1.
    # mean = (6 + 0 + 6 - 8) / 28 = 1/7; mean square = (6 + 0 + 12 + 8) / 28 = 13/14; var = 13/14 - 1/49 = 89/98
    assert len(found) == 4
    for (g, r, s), values in found.items():
        mask = torch.tensor(samples[g][r][s].mask)
        expected = (REWARD[g, r] - 1 / 7) / (89 / 98) ** 0.5
        assert values[mask].tolist() == pytest.approx([expected] * int(mask.sum()), rel=1e-5)
        assert not values[~mask].any()
    plain = spread(policy(advantage=AdvantageConfig(estimator="reinforce", no_whiten=True)), plan, samples)
    assert all(set(values.tolist()) == {0.0, REWARD[at[:2]]} for at, values in plain.items())


def test_group_advantages_are_whitened_per_token_if_the_estimator_says_so(policy):
    samples = make_samples()
    plan = make_plan(samples)
    found = spread(policy(advantage=AdvantageConfig(estimator="reinforce_baseline")), plan, samples)
    # 6 tokens of 0.7, 11 of -1.1, 3 of 0.4, 8 of -0.2: sum = 4.2 - 12.1 + 1.2 - 1.6 = -8.3
    # squares = 2.94 + 13.31 + 0.48 + 0.32 = 17.05
    mean, square = -8.3 / 28, 17.05 / 28
    for at, values in found.items():
        expected = (ADVANTAGE[at[:2]] - mean) / (square - mean**2) ** 0.5
        assert values[-1].item() == pytest.approx(expected, rel=1e-5)
    for at, values in spread(policy(advantage=AdvantageConfig(estimator="rloo")), plan, samples).items():
        assert values[-1].item() == pytest.approx(ADVANTAGE[at[:2]])


def test_staleness_by_hand(policy):
    samples = make_samples()
    metrics = train(policy(), make_plan(samples), samples)
    # 4 x 2 tokens of version 3 are 3 batches old, the other 28 - 8 = 20, of version 5, are 1 batch old.
    assert (metrics["staleness/mean"].total, metrics["staleness/mean"].count) == (8 * 3 + 20 * 1, 28)
    assert metrics["staleness/max"].total == 3


def weights_of(policy):
    return [p.detach().clone() for p in policy.model.parameters()]


def test_zero_advantages_move_nothing_and_are_no_error(policy):
    samples = make_samples()
    plan = [[[replace(t, advantage=0.0) for t in b] for b in step] for step in make_plan(samples)]
    ours = policy()
    before = weights_of(ours)
    metrics = train(ours, plan, samples)
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(ours), strict=True))
    assert metrics["train/grad_norm"].total == 0 and metrics["train/lr"].total > 0


@pytest.mark.parametrize("plan", [[], [[[]]]])
def test_a_rank_without_samples_takes_part(policy, plan):
    """An empty plan, and a step of which this rank has nothing (a dummy runs)."""
    ours = policy()
    before = weights_of(ours)
    metrics = train(ours, plan, {})
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(ours), strict=True))
    assert metrics["staleness/mean"].count == 0


@pytest.mark.parametrize("packed", [False, True])
def test_a_further_column_reaches_the_micro_batch(policy, packed):
    """One of two samples has it, and an entry is a pair: the other one's entries and the padding are its fill."""
    pairs = Column("pairs", "float32", fill=-1.0, shape=(2,))
    samples = make_samples(lengths=(9, 6, 6, 11))
    described = samples[0][1][0]
    values = np.arange(12, dtype=np.float32).reshape(6, 2)
    samples[0][1] = [replace(described, columns=described.columns.with_column(pairs, values))]
    plan = make_plan(samples, steps=(((0, 1),),))
    made = policy(packed=packed)
    made.prepare(plan, dict(enumerate(samples)), {}, 6, 0.0)
    (micro_batch,) = made.micro_batches(plan[0])
    got = micro_batch.columns["pairs"]
    assert got.shape == (*micro_batch.batch.token_ids.shape, 2)
    rows = [torch.full((9, 2), -1.0), torch.tensor(values)]
    if packed:
        assert torch.equal(got[0], torch.cat(rows))
    else:
        assert torch.equal(got[0], rows[0]) and torch.equal(got[1, :6], rows[1]) and (got[1, 6:] == -1).all()


@pytest.mark.parametrize("packed", [False, True])
def test_the_probe_has_log_probs_at_temperature_1(policy, packed):
    sequences = [[5, 9, 40, 7], [3, 8], [50] * 11]
    probed = policy(packed=packed).probe(sequences)
    model = tiny_qwen3()
    for ids, values in zip(sequences, probed, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        expected = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
        assert values.dtype == np.float32 and values[0] == 0
        np.testing.assert_allclose(values[1:], expected, atol=1e-5)


def test_named_tensors_are_the_whole_model_in_the_engines_dtype(policy):
    ours = policy()
    tensors = dict(ours.named_tensors())
    expected = {name: p for name, p in tiny_qwen3().named_parameters() if name != "lm_head.weight"}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], p) for name, p in expected.items())


def test_arrays_of_the_object_store_may_be_read_only(policy):
    samples = make_samples()
    for sample in (segments[0] for rollouts in samples for segments in rollouts):
        for array in (sample.token_ids, sample.versions, sample.logprobs):
            array.flags.writeable = False
    train(policy(), make_plan(samples), samples)


def two_steps(policy, plan, samples):
    """Metrics of all ranks, and the largest weight change."""
    before = [whole(p) for p in policy.model.parameters()]
    metrics = train(policy, plan, samples)
    moved = [(whole(p) - b).abs().max().item() for p, b in zip(policy.model.parameters(), before, strict=True)]
    return metrics, max(moved)


def on_a_rank(mesh, path, plans, samples):
    whitened = AdvantageConfig(estimator="reinforce")
    return two_steps(Policy(settings(path, advantage=whitened), mesh), plans[mesh.data_rank], samples)


@pytest.mark.processes
@pytest.mark.parametrize("share", ["nothing of step 2", "nothing at all"])
def test_two_ranks_do_what_one_does(policy, tiny, tmp_path, share):
    """Whitening, weights and gradients are of the whole batch, whatever the second rank has of it."""
    samples = make_samples()
    whole_plan = make_plan(samples, (((0, 1), (2,)), ((3,),)))
    first, second = whole_plan
    plans = [[[first[0]], second], [[first[1]], [[]]]]
    if share == "nothing at all":
        plans = [whole_plan, [[[], []], [[]]]]
    one, moved = two_steps(policy(advantage=AdvantageConfig(estimator="reinforce")), whole_plan, samples)
    ranks = run_ranks(on_a_rank, 2, tmp_path, tiny, plans, samples)
    merged = report.merge(metrics for metrics, _ in ranks)
    assert merged.keys() == one.keys()
    for name, metric in report.values(merged).items():
        assert metric == pytest.approx(report.values(one)[name], rel=1e-4, abs=1e-6), name
    assert merged["ratio/mean"].count == one["ratio/mean"].count == 28
    assert [change for _, change in ranks] == pytest.approx([moved] * 2, rel=1e-3)


@pytest.mark.parametrize("chats", [True, False])
def test_the_export_ends_where_the_rollouts_ended(tiny, tmp_path, chats):
    """With chats at the template's end of a turn too, which this base model's tokenizer does not name."""
    tokenizer = char_tokenizer()
    tokenizer.eos_token = "<|pad|>"
    policy = Policy(replace(settings(tiny), apply_chat_template=chats), alone())
    policy.model.causal_lm.generation_config.eos_token_id = None
    try:
        policy.export(tokenizer, tmp_path)
    finally:
        dist.destroy_process_group()
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written["eos_token_id"] == ([PAD_ID, END_ID] if chats else PAD_ID)
