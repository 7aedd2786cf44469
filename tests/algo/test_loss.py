"""Every loss against a float64 reference with plain loops, its gradient against the formula or finite differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from molt.algo.loss import LOSSES, cispo, gmpo, gspo, ppo
from molt.batch.collate import collate, gather, scatter
from molt.errors import TrainingError


def bounded_log_ratio(new, before):
    return min(max(new - before, -30.0), 30.0)


def reference_gmpo(samples, low, high):
    """Per sample `(losses, clipped)` from the products of the paper: the root of `prod min(r^sign, e^bound)^sign`."""
    out = []
    for logprobs, old, advantages, mask in samples:
        product = 1.0
        trained = 0
        clipped = []
        for new, before, advantage, m in zip(logprobs, old, advantages, mask, strict=True):
            ratio = math.exp(bounded_log_ratio(new, before))
            assume(not any(math.isclose(ratio, b, rel_tol=1e-9) for b in (math.exp(high), math.exp(-low))))
            near = ratio
            if advantage > 0:
                near = min(ratio, math.exp(high))
            elif advantage < 0:
                near = 1 / min(1 / ratio, math.exp(low))
            clipped.append(near != pytest.approx(ratio, rel=1e-12))
            if m:
                product *= near
                trained += 1
        s = product ** (1 / trained) if trained else 1.0
        out.append(([-s * advantage for advantage in advantages], clipped))
    return out


def reference(name, samples, low, high, dual_clip):
    """Per sample `(losses, clipped)`, token by token."""
    if name == "gmpo":
        return reference_gmpo(samples, low, high)
    out = []
    for logprobs, old, advantages, mask in samples:
        logs = [bounded_log_ratio(*pair) for pair in zip(logprobs, old, strict=True)]
        trained = [d for d, m in zip(logs, mask, strict=True) if m]
        losses = []
        clipped = []
        for new, d, advantage in zip(logprobs, logs, advantages, strict=True):
            if name == "gspo":
                d = sum(trained) / len(trained) if trained else 0.0
            ratio = math.exp(d)
            bounds = (1 - low, 1 + high, dual_clip or 9, high)
            assume(not any(math.isclose(ratio, b, rel_tol=1e-9) for b in bounds))  # either way there is right
            if name == "cispo":
                losses.append(-min(ratio, high) * advantage * new)
                clipped.append(ratio > high)
                continue
            objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
            if dual_clip is not None and advantage < 0:
                objective = max(objective, dual_clip * advantage)
            losses.append(-objective)
            clipped.append(objective != ratio * advantage)
        out.append((losses, clipped))
    return out


def run(name, samples, packed=True, **scalars):
    """`(losses, clipped)` per sample through a micro-batch."""
    batch = collate([np.zeros(len(s[0]), np.int64) for s in samples], packed=packed)
    tensors = [scatter(batch, [np.array(s[i], d) for s in samples]) for i, d in enumerate(("f8", "f8", "f8", "?"))]
    columns = LOSSES[name].fn(*tensors, batch.segments, **scalars)
    return list(zip(*([x.tolist() for x in gather(batch, column)] for column in columns), strict=True))


def flat(fn, logprobs, old, advantages, *, low=0.2, high=0.2, dual_clip=None):
    """One sample, all of it trained."""
    mask = torch.ones(len(logprobs)).bool()
    segments = torch.zeros(len(logprobs)).long()
    return fn(logprobs, old, advantages, mask, segments, low=low, high=high, dual_clip=dual_clip)


far = st.floats(-40, 0)
near = st.floats(-1, -0.5)
advantage = st.integers(-40, 40).map(lambda n: n / 8)
token = st.one_of(*(st.tuples(x, x, advantage, st.booleans()) for x in (far, near)))
sample = st.lists(token, min_size=1, max_size=12).map(lambda tokens: tuple(zip(*tokens, strict=True)))
bound = st.floats(0.05, 0.5)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", LOSSES)
@given(st.lists(sample, min_size=1, max_size=5), bound, bound, st.sampled_from([None, 1.1, 3.0]))
def test_every_loss_matches_the_reference(name, packed, samples, low, high, dual_clip):
    expected = reference(name, samples, low, high, dual_clip)
    got = run(name, samples, packed, low=low, high=high, dual_clip=dual_clip)
    for (loss, clipped), (expected_loss, expected_clipped) in zip(got, expected, strict=True):
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6, atol=1e-6)
        assert clipped == expected_clipped


def test_ppo_by_hand():
    # Ratios 1.5, 0.5, 1.5, 0.5, 1; bounds 0.8 and 1.3; advantages 2, 2, -2, -2, 2.
    # min(3, 2.6) = 2.6 clipped; min(1, 1.6) = 1; min(-3, -2.6) = -3; min(-1, -1.6) = -1.6 clipped; 2.
    logprobs = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.0]).log()
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0])
    loss, clipped = flat(ppo, logprobs, torch.zeros(5), advantages, low=0.2, high=0.3)
    assert loss.tolist() == pytest.approx([-2.6, -1.0, 3.0, 1.6, -2.0])
    assert clipped.tolist() == [True, False, False, True, False]


def test_dual_clip_by_hand():
    # Ratios 5, 2, 5, 0.5; advantages -2, -2, 2, -2; c = 3.
    # max(-10, -6) = -6 clipped; max(-4, -6) = -4; A > 0: min(10, 2.4) clipped; max(min(-1, -1.6), -6) = -1.6 clipped.
    logprobs = torch.tensor([5.0, 2.0, 5.0, 0.5], dtype=torch.float64).log().requires_grad_()
    loss, clipped = flat(ppo, logprobs, torch.zeros(4), torch.tensor([-2.0, -2.0, 2.0, -2.0]), dual_clip=3.0)
    assert loss.tolist() == pytest.approx([6, 4, -2.4, 1.6])
    assert clipped.tolist() == [True, False, True, True]
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([0, 4, 0, 0])  # d(2 r)/d(log r) = 2 r where the gradient lives


def test_gspo_by_hand():
    # Sample 0: ratios 4, 1 and an untrained 100: s = sqrt(4) = 2, clipped to 1.2 for A > 0, free for A < 0.
    # Sample 1: ratio 1.1. Sample 2: nothing trained: s = 1.
    samples = [
        (np.log([4, 1, 100]), [0, 0, 0], [1, -1, 1], [True, True, False]),
        (np.log([1.1]), [0], [3], [True]),
        (np.log([7]), [0], [1], [False]),
    ]
    (first, clipped), (second, free), (third, _) = run("gspo", samples, low=0.2, high=0.2)
    assert first == pytest.approx([-1.2, 2, -1.2]) and clipped == [True, False, True]
    assert second == pytest.approx([-3.3]) and free == [False]
    assert third == [-1]


def test_the_gradient_of_gspo_goes_through_each_token_with_the_ratio_of_the_sample():
    # s = exp((0.2 - 0.1 + 0) / 3); per token the gradient of -s_t A_t is -s A_t, and 0 in the clipped sample 1.
    log_ratio = torch.tensor([0.2, -0.1, 0.0, 0.9], dtype=torch.float64)
    old = torch.full((4,), -1.5, dtype=torch.float64, requires_grad=True)
    logprobs = (old.detach() + log_ratio).requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 3.0, 1.0]).double()
    segments = torch.tensor([0, 0, 0, 1])
    loss, clipped = gspo(logprobs, old, advantages, torch.ones(4).bool(), segments, low=0.2, high=0.2)
    loss.sum().backward()
    s = math.exp(0.1 / 3)
    assert logprobs.grad.tolist() == pytest.approx([-s, 2 * s, -3 * s, 0])
    assert clipped.tolist() == [False, False, False, True] and old.grad is None


def test_with_one_advantage_per_sample_gspo_has_the_gradient_of_the_sequence_ratio():
    """The paper's GSPO: `d/dlogp_t of -s A` is `-s A / len`, so the token form is len times that."""
    logprobs = torch.tensor([-1.0, -0.7, -1.2], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.1, -0.8, -1.0], dtype=torch.float64)
    (-2.0 * (logprobs - old).mean().exp()).backward()
    sequence, logprobs.grad = logprobs.grad, None
    flat(gspo, logprobs, old, torch.full((3,), 2.0).double())[0].mean().backward()
    np.testing.assert_allclose(logprobs.grad, sequence, rtol=1e-12)


def test_cispo_by_hand_keeps_the_gradient_of_clipped_tokens():
    # Ratios 5, 0.5, 5; ceiling 2; logprobs log(r) + old with old = -3; A = 1, -2, -1: the weight times A is 2, -1, -2.
    old = torch.full((3,), -3.0, dtype=torch.float64)
    logprobs = (old + torch.tensor([5.0, 0.5, 5.0]).double().log()).requires_grad_()
    loss, clipped = flat(cispo, logprobs, old, torch.tensor([1.0, -2.0, -1.0]).double(), low=0.9, high=2.0)
    weight = torch.tensor([2.0, -1.0, -2.0]).double()
    np.testing.assert_allclose(loss.detach(), -(weight * logprobs).detach(), rtol=1e-12)
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-2, 1, 2])
    assert clipped.tolist() == [True, False, True]


def test_gmpo_by_hand():
    # Bounds e^0.4 = 1.4918 and e^-0.4 = 0.6703.
    # Sample 0, A > 0: ratios 4 (clipped to e^0.4), 0.1 (free below) and an untrained 100: s = sqrt(e^0.4 * 0.1).
    # Sample 1, A < 0: ratios 4 (free above), 0.1 (clipped to e^-0.4): s = sqrt(4 * e^-0.4).
    # Sample 2: nothing is trained, s = 1. Sample 3: A = 0 has no bound.
    samples = [
        (np.log([4, 0.1, 100]), [0, 0, 0], [1, 1, 1], [True, True, False]),
        (np.log([4, 0.1]), [0, 0], [-2, -2], [True, True]),
        (np.log([7]), [0], [-3], [False]),
        (np.log([9]), [0], [0], [True]),
    ]
    (good, clipped_above), (bad, clipped_below), (none, _), (zero, free) = run("gmpo", samples, low=0.4, high=0.4)
    assert good == pytest.approx([-math.sqrt(math.exp(0.4) * 0.1)] * 3) and clipped_above == [True, False, True]
    assert bad == pytest.approx([2 * math.sqrt(4 * math.exp(-0.4))] * 2) and clipped_below == [False, True]
    assert none == [3] and zero == [0] and free == [False]


def test_the_bounds_of_gmpo_are_apart():
    # A > 0: log 4 = 1.386 is clipped to high = 1; A < 0: log 0.1 = -2.303 to -low = -0.5.
    logprobs = torch.tensor([4.0, 0.1], dtype=torch.float64).log()
    for advantage, expected in [(1.0, (1 + math.log(0.1)) / 2), (-1.0, (math.log(4) - 0.5) / 2)]:
        advantages = torch.full((2,), advantage, dtype=torch.float64)
        loss, _ = flat(gmpo, logprobs, torch.zeros(2), advantages, low=0.5, high=1.0)
        assert loss.tolist() == pytest.approx([-advantage * math.exp(expected)] * 2)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_with_one_advantage_per_sample_gmpo_is_the_objective_of_the_paper(advantage):
    """`-s A` of three tokens, one of them clipped: its mean over the tokens has the gradient of `-s A` itself."""
    # 0.1 is free, 0.3 free, 0.9 (or -0.9) beyond the bound: s = exp((0.1 + 0.3 + 0.4) / 3), the last one without.
    sign = math.copysign(1, advantage)
    old = torch.full((3,), -1.5, dtype=torch.float64, requires_grad=True)
    logprobs = (old.detach() + sign * torch.tensor([0.1, 0.3, 0.9], dtype=torch.float64)).requires_grad_()
    loss, clipped = flat(gmpo, logprobs, old, torch.full((3,), advantage).double(), low=0.4, high=0.4)
    loss.mean().backward()
    s = math.exp(sign * 0.8 / 3)
    assert loss.tolist() == pytest.approx([-s * advantage] * 3) and clipped.tolist() == [False, False, True]
    assert logprobs.grad.tolist() == pytest.approx([-s * advantage / 3, -s * advantage / 3, 0]) and old.grad is None


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_ppo_gradient_matches_finite_differences(dual_clip):
    # Away from the kinks at 0.8, 1.2, 3 and the clamp, clipped and free tokens, both signs, one clamped ratio.
    log_ratio = torch.tensor([0.0, 0.1, 0.5, -0.5, 0.5, -0.5, 1.5, 31.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    old = torch.full((8,), -1.5, dtype=torch.float64, requires_grad=True)
    logprobs = (old.detach() + log_ratio).requires_grad_()
    flat(ppo, logprobs, old, advantages, dual_clip=dual_clip)[0].sum().backward()
    assert old.grad is None
    # Tokens do not interact, so one shift of all of them differentiates each.
    shifted = (flat(ppo, logprobs.detach() + s, old, advantages, dual_clip=dual_clip)[0] for s in (1e-6, -1e-6))
    above, below = shifted
    np.testing.assert_allclose(logprobs.grad.numpy(), ((above - below) / 2e-6).detach().numpy(), atol=1e-6)


def gradients_of(name, samples, packed):
    """The gradient of `sum(weight * loss_t)` to the log-probs of each sample; where trained tokens are clipped."""
    batch = collate([np.zeros(len(s[0]), np.int64) for s in samples], packed=packed)
    leaves = [torch.tensor(s[0], dtype=torch.float64, requires_grad=True) for s in samples]
    logprobs = scatter(batch, leaves)
    old, advantages, weights = (scatter(batch, [np.array(s[i], "f8") for s in samples]) for i in (1, 2, 4))
    mask = scatter(batch, [np.array(s[3], "?") for s in samples])
    high = 1.1 if LOSSES[name].bounds == "weight" else 0.1
    loss, clipped = LOSSES[name].fn(logprobs, old, advantages, mask, batch.segments, low=0.1, high=high)
    return torch.autograd.grad((weights * mask * loss).sum(), leaves), clipped[mask]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_does_not_depend_on_what_else_is_in_the_micro_batch(name, packed):
    rng = np.random.default_rng(5)
    samples = []
    for length in (7, 1, 4, 12, 3):
        old = rng.uniform(-3, -1, length)
        samples.append(
            (
                old + rng.normal(scale=0.3, size=length),
                old,
                rng.normal(size=length),
                np.arange(length) % 3 != 2,
                rng.uniform(0.1, 1, length),
            )
        )
    together, clipped = gradients_of(name, samples, packed)
    assert clipped.any() and not clipped.all() and all(gradient.any() for gradient in together)
    for sample, expected in zip(samples, together, strict=True):
        (alone,), _ = gradients_of(name, [sample], packed)
        np.testing.assert_allclose(alone, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_at_the_old_weights_every_loss_is_the_plain_policy_gradient(name):
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    loss, clipped = flat(LOSSES[name].fn, logprobs, logprobs.detach(), torch.tensor([3.0, -1.0]), high=1.2)
    loss.sum().backward()
    assert logprobs.grad.tolist() == [-3, 1] and not clipped.any()


@pytest.mark.parametrize("name", LOSSES)
def test_no_trained_token_and_no_advantage_is_no_nan(name):
    logprobs = torch.zeros(1, 3, requires_grad=True)
    none = torch.zeros(1, 3).bool()
    one = torch.zeros(1, 3).long()
    loss, _ = LOSSES[name].fn(logprobs, torch.zeros(1, 3), torch.zeros(1, 3), none, one, low=0.2, high=0.2)
    loss.sum().backward()
    assert not loss.any() and not logprobs.grad.any()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "advantages"])
def test_a_nan_is_an_error_that_names_its_tensor(name, loss):
    tensors = {key: torch.zeros(3) for key in ("logprobs", "old_logprobs", "advantages")}
    tensors[name] = torch.tensor([0.0, math.nan, 0.0])
    with pytest.raises(TrainingError, match=f"^{name} holds 1 NaN in 3 tokens"):
        flat(LOSSES[loss].fn, *tensors.values())


@pytest.mark.parametrize("loss", LOSSES)
def test_the_difference_of_two_infinities_is_an_error(loss):
    infinite = torch.tensor([-math.inf])
    with pytest.raises(TrainingError, match=r"^log_ratio holds 1 NaN"):
        flat(LOSSES[loss].fn, infinite, infinite, torch.ones(1))


def test_the_formula_of_every_row_has_its_bounds():
    bounds = {"low": 0.2, "high": 0.3, "dual_clip": None}
    formulas = {}
    for name, loss in LOSSES.items():
        _, where = loss.where or ("", "")
        formulas[name] = (loss.formula + where).format(**bounds)
    assert formulas["ppo"] == "-min(r A, clip(r, 1 - 0.2, 1 + 0.3) A)"
    assert all("0.3" in formula for formula in formulas.values())


def test_the_bounds_of_every_row():
    """ppo: its paper. gspo, gmpo: what their papers train with. cispo: a ceiling above 1."""
    assert {name: loss.low_high for name, loss in LOSSES.items()} == {
        "ppo": (0.2, 0.2),
        "gspo": (3e-4, 4e-4),
        "cispo": (0.2, 5.0),
        "gmpo": (0.4, 0.4),
    }
