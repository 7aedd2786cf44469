"""Gradients of the losses: KL terms in expectation over every rollout of a toy agent, policy losses by differences.

Where a loss has a stop-gradient, the NumPy surrogate that is differentiated has that quantity as a constant.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from molt import rules
from molt.algo.kl import kl_per_token
from molt.algo.loss import LOSSES
from molt.cli.args import parse
from molt.config import RLConfig
from tests.algo.mdp import STATES, VOCABULARY, log_policy, slope, toy

_rng = np.random.default_rng(7)
THETA, REFERENCE = _rng.normal(size=(2, STATES, VOCABULARY))
AGENT = toy(linked=True)
GOOD = "--actor.model_name_or_path m --data.prompt_dataset p.jsonl --train.agent_path a.py --rollout.batch_size 16"


def expected_kl_gradient(estimator: str, *, from_reference: bool = False) -> np.ndarray:
    """`E[gradient of sum_t KL_t]` over all rollouts of the policy (or of the reference), by autograd."""
    theta = torch.tensor(THETA, requires_grad=True)
    reference = AGENT.logprobs(torch.tensor(REFERENCE))
    per_token = kl_per_token(AGENT.logprobs(theta), reference, estimator, from_reference=from_reference)
    chances = torch.tensor(AGENT.chances(REFERENCE if from_reference else THETA).prod(-1))
    mask = torch.tensor(AGENT.mask)
    (gradient,) = torch.autograd.grad((chances * (per_token * mask).sum((1, 2))).sum(), theta)
    return gradient.numpy()


def reverse(theta: np.ndarray) -> np.ndarray:
    """[states]: KL(policy || reference) of one token."""
    policy = log_policy(theta)
    reference = log_policy(REFERENCE)
    return (np.exp(policy) * (policy - reference)).sum(-1)


def forward(theta: np.ndarray) -> np.ndarray:
    """[states]: KL(reference || policy) of one token."""
    policy = log_policy(theta)
    reference = log_policy(REFERENCE)
    return (np.exp(reference) * (reference - policy)).sum(-1)


@pytest.mark.parametrize(("estimator", "kl"), [("k2", reverse), ("k3", forward)])
def test_a_kl_in_the_loss_descends_the_kl_of_each_token(estimator, kl):
    """Tokens from the policy, in the states it visits, and these visits held fixed (exact for one token).

    k2: `E_pi[d grad log pi] = grad KL(pi || ref)`, as `E_pi[grad log pi] = 0`.
    k3: `E_pi[(1 - ref / pi) grad log pi] = -sum ref grad log pi = grad KL(ref || pi)`.
    """
    visits = AGENT.visits(THETA)
    expected = slope(lambda th: float(visits @ kl(th)), THETA)
    got = expected_kl_gradient(estimator)
    assert np.abs(expected).max() > 0.05
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-7)
    other = forward if kl is reverse else reverse
    assert np.abs(got - slope(lambda th: float(visits @ other(th)), THETA)).max() > 0.01


def test_k3_on_tokens_of_the_rollout_policy_descends_the_kl_of_the_rollout_policy_to_the_policy():
    """`E_ref[(pi / ref - 1) grad log pi] = -E_ref[grad log pi] = grad KL(ref || pi)`, of whole rollouts.

    The rollout policy does not move, so neither do its visits: nothing needs to be held.
    """
    chances = AGENT.chances(REFERENCE).prod(-1)

    def whole_rollouts(theta: np.ndarray) -> float:
        log_ratios = AGENT.of_tokens(log_policy(REFERENCE)) - AGENT.of_tokens(log_policy(theta))
        return float(chances @ log_ratios.sum((1, 2)))

    expected = slope(whole_rollouts, THETA)
    assert np.abs(expected).max() > 0.05
    np.testing.assert_allclose(expected_kl_gradient("k3", from_reference=True), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_value_of_k1_and_k3_is_the_reverse_kl(estimator):
    """`E_pi[k1] = E_pi[k3] = KL(pi || ref)` (k3 adds `ref / pi - 1`, of mean 0); k2 is near it but biased."""
    logprobs = AGENT.logprobs(torch.tensor(THETA))
    reference = AGENT.logprobs(torch.tensor(REFERENCE))
    per_token = (kl_per_token(logprobs, reference, estimator).numpy() * AGENT.mask).sum((1, 2))
    value = AGENT.chances(THETA).prod(-1) @ per_token
    expected = AGENT.visits(THETA) @ reverse(THETA)
    assert (abs(value - expected) < 1e-12) == (estimator != "k2")


def test_k1_in_the_loss_would_do_nothing():
    """`E_pi[grad d] = E_pi[grad log pi] = 0`: noise without a direction."""
    np.testing.assert_allclose(expected_kl_gradient("k1"), 0, atol=1e-12)


def test_k1_in_the_loss_is_refused():
    def complaints(estimator: str) -> list[str]:
        flags = f"{GOOD} --algo.kl.init_coef 0.1 --algo.kl.use_loss --algo.kl.estimator {estimator}"
        return rules.errors("rl", parse(RLConfig, flags.split(), prog="molt"))

    assert any("`algo.kl.estimator` (=k1)" in text for text in complaints("k1"))
    assert complaints("k2") == complaints("k3") == []


# Policy losses: five samples of up to five tokens, chosen in three states; the ratios r = new / old are given.

MASK = np.array([[t < n and (s, t) != (0, 2) for t in range(5)] for s, n in enumerate([5, 3, 1, 4, 4])])
"""Padding at the end, and one token in the middle of sample 0 that was not generated."""
SEGMENTS = np.repeat(np.arange(5)[:, None], 5, axis=1)
NEW = _rng.normal(size=(3, VOCABULARY))
STATE, TOKEN = _rng.integers(0, 3, size=(2, 5, 5))
LOG_RATIOS = np.array([-0.35, 0.02, 0.45, -0.4, 0.4])[:, None] + np.array([0.3, -0.4, 0.0, 0.45, -0.25])
ADVANTAGES = np.array([-1.0, 1.0, 1.0, 1.0, -1.0])[:, None] * np.array([1.5, -0.5, 2.0, 0.7, 1.0])
"""A token with an advantage of the other sign in every sample of more than one."""
WEIGHTS = MASK * _rng.uniform(0.5, 1.5, size=(5, 5))


def logprobs_of(theta: np.ndarray) -> np.ndarray:
    return log_policy(theta)[STATE, TOKEN]


OLD_LOGPROBS = logprobs_of(NEW) - LOG_RATIOS


def gradient(name: str, advantages=ADVANTAGES, weights=WEIGHTS, **scalars) -> tuple[np.ndarray, np.ndarray]:
    """(gradient of `sum(weight * loss)` at NEW by autograd, where the loss says that it clipped)."""
    theta = torch.tensor(NEW, requires_grad=True)
    logprobs = theta.log_softmax(-1)[torch.tensor(STATE), torch.tensor(TOKEN)]
    old = torch.tensor(OLD_LOGPROBS)
    tensors = [torch.tensor(a) for a in (advantages, MASK, SEGMENTS)]
    loss, clipped = LOSSES[name].fn(logprobs, old, *tensors, **scalars)
    (gradient,) = torch.autograd.grad((torch.tensor(weights) * loss).sum(), theta)
    return gradient.numpy(), clipped.numpy() & MASK


def differences(loss: Callable[[float, float, float], float], ratios: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Central differences of `sum over trained tokens of weight * loss(ratio, advantage, logprob)`."""

    def total(theta: np.ndarray) -> float:
        ratio = ratios(theta)
        logprobs = logprobs_of(theta)
        tokens = zip(*(a[MASK].tolist() for a in (WEIGHTS, ratio, ADVANTAGES, logprobs)), strict=True)
        return sum(w * loss(r, a, logp) for w, r, a, logp in tokens)

    return slope(total, NEW)


def clipped_objective(low: float, high: float, dual_clip: float | None) -> Callable[[float, float, float], float]:
    def loss(ratio: float, advantage: float, logprob: float) -> float:
        value = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        return -max(value, dual_clip * advantage) if dual_clip and advantage < 0 else -value

    return loss


def token_ratios(theta: np.ndarray) -> np.ndarray:
    return np.exp(logprobs_of(theta) - OLD_LOGPROBS)


def sample_ratios(theta: np.ndarray) -> np.ndarray:
    """[5, 5]: `exp(mean over the trained tokens of the sample of logp - old)`."""
    log_ratios = logprobs_of(theta) - OLD_LOGPROBS
    means = [sum(row[t] for t in range(5) if MASK[s, t]) / MASK[s].sum() for s, row in enumerate(log_ratios)]
    return np.exp(np.repeat(np.array(means)[:, None], 5, axis=1))


def covered(kinks: list[float], ratios: np.ndarray) -> bool:
    """No ratio is where the loss has no derivative; each region between has tokens with advantages of each sign."""
    apart = np.abs(ratios[MASK][:, None] - kinks).min() > 1e-3
    found = set(zip(np.searchsorted(kinks, ratios[MASK]).tolist(), np.sign(ADVANTAGES[MASK]).tolist(), strict=True))
    return apart and found == {(region, sign) for region in range(len(kinks) + 1) for sign in (-1, 1)}


@pytest.mark.parametrize("dual_clip", [None, 1.9])
def test_ppo_is_the_gradient_of_its_surrogate(dual_clip):
    """Nothing is frozen in `-min(r A, clip(r) A)`, but old; the dual clip changes the gradient where r > c, A < 0."""
    low = 0.4
    high = 0.25
    assert covered([0.6, 1.25, 1.9], token_ratios(NEW))
    got, clipped = gradient("ppo", low=low, high=high, dual_clip=dual_clip)
    expected = differences(clipped_objective(low, high, dual_clip), token_ratios)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    assert clipped.any() and not clipped[MASK].all()
    without = gradient("ppo", low=low, high=high)[0]
    assert np.allclose(got, without) == (dual_clip is None)


def test_gspo_is_the_gradient_of_its_surrogate():
    """`s_t = exp(logp - logp(NEW) + log s(NEW))` with both quantities of NEW constants, then as ppo."""
    low = 0.25
    high = 0.6
    frozen_logprobs = logprobs_of(NEW)
    frozen_ratios = sample_ratios(NEW)
    assert covered([0.75, 1.6], frozen_ratios)
    got, clipped = gradient("gspo", low=low, high=high)
    expected = differences(
        clipped_objective(low, high, None), lambda th: np.exp(logprobs_of(th) - frozen_logprobs) * frozen_ratios
    )
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    assert clipped.any() and not clipped[MASK].all()


def test_gspo_with_one_advantage_per_sample_is_the_gradient_of_the_sequence_objective():
    """`sum over samples of -min(s A, clip(s) A)` with nothing frozen: the token form has the gradient of the paper's,
    as the mean over the tokens of `s A grad logp_t` is `A grad s`."""
    low = 0.25
    high = 0.6
    per_sample = ADVANTAGES[:, 0]
    advantages = np.repeat(per_sample[:, None], 5, axis=1)
    weights = MASK / MASK.sum(1, keepdims=True)
    got, clipped = gradient("gspo", advantages, weights, low=low, high=high)
    loss = clipped_objective(low, high, None)
    expected = slope(lambda th: sum(map(loss, sample_ratios(th)[:, 0], per_sample, [0.0] * 5)), NEW)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    # Below the band with A < 0 and above it with A > 0 a sample is clipped as a whole, the others are free.
    assert [row.any() for row in clipped] == [True, False, True, False, False]


def test_cispo_is_the_gradient_of_its_surrogate():
    """`-min(r(NEW), hi) A logp`: the weight is a constant, so a clipped token keeps its gradient; low is not read."""
    frozen = np.minimum(token_ratios(NEW), 1.3)
    assert covered([1.3], token_ratios(NEW))
    got, clipped = gradient("cispo", low=0.2, high=1.3)
    np.testing.assert_allclose(got, differences(lambda c, a, logp: -c * a * logp, lambda th: frozen), rtol=0, atol=1e-6)
    assert clipped.any() and not clipped[MASK].all()
    np.testing.assert_array_equal(got, gradient("cispo", low=0.9, high=1.3)[0])


def bounded_sample_ratios(low: float, high: float) -> Callable[[np.ndarray], np.ndarray]:
    """[5, 5]: `exp(mean over the trained tokens of the sample of l)`, l bounded on one side by the sign of A."""

    def of(theta: np.ndarray) -> np.ndarray:
        means = []
        for sample, row in enumerate(logprobs_of(theta) - OLD_LOGPROBS):
            bounded = []
            for token, log_ratio in enumerate(row):
                if MASK[sample, token]:
                    is_good = ADVANTAGES[sample, token] > 0
                    bounded.append(min(log_ratio, high) if is_good else max(log_ratio, -low))
            means.append(sum(bounded) / len(bounded))
        return np.exp(np.repeat(np.array(means)[:, None], 5, axis=1))

    return of


def test_gmpo_is_the_gradient_of_its_surrogate():
    """`s_t = exp(l_t - l_t(NEW) + log s(NEW))` with both quantities of NEW constants, and `-s_t A`."""
    low = 0.25
    high = 0.3
    frozen = bounded_sample_ratios(low, high)(NEW)
    bound = np.where(ADVANTAGES > 0, high, low)

    def one_sided(theta: np.ndarray) -> np.ndarray:
        sign = np.sign(ADVANTAGES)
        return sign * np.minimum(sign * (logprobs_of(theta) - OLD_LOGPROBS), bound)

    assert np.abs(np.abs(LOG_RATIOS[MASK])[:, None] - [low, high]).min() > 1e-3
    at_new = one_sided(NEW)
    got, clipped = gradient("gmpo", low=low, high=high)
    expected = differences(lambda s, a, logp: -s * a, lambda th: np.exp(one_sided(th) - at_new) * frozen)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(clipped, (np.sign(ADVANTAGES) * LOG_RATIOS > bound) & MASK)
    assert clipped.any() and not clipped[MASK].all()


def test_gmpo_with_one_advantage_per_sample_is_the_gradient_of_the_objective_of_the_paper():
    """`sum over samples of -s A` with nothing frozen but the bounds, at one weight per sample over its tokens."""
    low = 0.25
    high = 0.3
    per_sample = ADVANTAGES[:, 0]
    advantages = np.repeat(per_sample[:, None], 5, axis=1)
    weights = MASK / MASK.sum(1, keepdims=True)
    got, clipped = gradient("gmpo", advantages, weights, low=low, high=high)

    def objective(theta: np.ndarray) -> float:
        total = 0.0
        for sample, row in enumerate(logprobs_of(theta) - OLD_LOGPROBS):
            trained = row[MASK[sample]]
            bounded = np.minimum(trained, high) if per_sample[sample] > 0 else np.maximum(trained, -low)
            total -= per_sample[sample] * float(np.exp(bounded.mean()))
        return total

    np.testing.assert_allclose(got, slope(objective, NEW), rtol=0, atol=1e-6)
    assert clipped.any() and not clipped[MASK].all()


@pytest.mark.parametrize("name", LOSSES)
def test_at_old_weights_every_loss_is_the_policy_gradient(name):
    """All ratios are 1 (within every bound): `-A grad logp`, the gradient that the estimators' proofs start from."""
    theta = torch.tensor(NEW, requires_grad=True)
    logprobs = theta.log_softmax(-1)[torch.tensor(STATE), torch.tensor(TOKEN)]
    tensors = [torch.tensor(a) for a in (ADVANTAGES, MASK, SEGMENTS)]
    loss, clipped = LOSSES[name].fn(logprobs, logprobs.detach(), *tensors, low=0.2, high=1.3)
    (got,) = torch.autograd.grad((torch.tensor(WEIGHTS) * loss).sum(), theta)
    expected = slope(lambda th: -float((WEIGHTS * ADVANTAGES * logprobs_of(th)).sum()), NEW)
    np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=1e-6)
    assert not clipped.any()
