"""The KL estimators against loops, against the true KL of a categorical distribution, and the controller."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt.algo.kl import FORMULAS, adapt, kl_per_token
from molt.config import KlConfig
from molt.errors import TrainingError


def reference(estimator, new, ref, from_reference):
    d = min(max(new - ref, -30.0), 30.0)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2
    return math.exp(d) - 1 - d if from_reference else math.exp(-d) - 1 + d


far = st.floats(-50, 0)
near = st.floats(-1, -0.5)


@pytest.mark.parametrize("from_reference", [False, True])
@pytest.mark.parametrize("estimator", FORMULAS)
@given(st.lists(st.one_of(st.tuples(far, far), st.tuples(near, near)), min_size=1, max_size=20))
def test_every_estimator_matches_the_reference(estimator, from_reference, pairs):
    logprobs, ref = torch.tensor(pairs, dtype=torch.float64).T
    got = kl_per_token(logprobs, ref, estimator, from_reference=from_reference)
    expected = [reference(estimator, new, old, from_reference) for new, old in pairs]
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_by_hand():
    # d = ln 2: ln 2; (ln 2)^2 / 2; 1/2 - 1 + ln 2; from the reference 2 - 1 - ln 2.
    pair = (torch.tensor([math.log(0.5)]).double(), torch.tensor([math.log(0.25)]).double())
    ln2 = math.log(2)
    assert kl_per_token(*pair, "k1").item() == pytest.approx(ln2)
    assert kl_per_token(*pair, "k2").item() == pytest.approx(ln2**2 / 2)
    assert kl_per_token(*pair, "k3").item() == pytest.approx(ln2 - 0.5)
    assert kl_per_token(*pair, "k3", from_reference=True).item() == pytest.approx(1 - ln2)


P = torch.tensor([0.5, 0.3, 0.15, 0.05]).double()
Q = torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
KL_PQ = (P * (P / Q).log()).sum()
KL_QP = (Q * (Q / P).log()).sum()


@pytest.mark.parametrize(("sampled_from", "estimator", "mean"), [(P, "k1", KL_PQ), (P, "k3", KL_PQ), (Q, "k3", KL_QP)])
def test_the_mean_over_all_tokens_is_the_kl(sampled_from, estimator, mean):
    per_token = kl_per_token(P.log(), Q.log(), estimator, from_reference=sampled_from is Q)
    assert (sampled_from * per_token).sum().item() == pytest.approx(mean.item())


def softmax_gradient(loss_of):
    """Of `loss_of(log-probs)` at the policy P, by its logits."""
    logits = P.log().requires_grad_()
    loss_of(torch.log_softmax(logits, 0)).backward()
    return logits.grad.numpy()


@pytest.mark.parametrize(
    ("sampled_from", "estimator", "kl"),
    [
        (P, "k2", lambda logp: (logp.exp() * (logp - Q.log())).sum()),  # the reverse KL(policy || reference)
        (P, "k3", lambda logp: (Q * (Q.log() - logp)).sum()),  # the forward KL(reference || policy)
        (Q, "k3", lambda logp: (Q * (Q.log() - logp)).sum()),
    ],
)
def test_as_a_loss_the_mean_gradient_over_sampled_tokens_is_that_of_a_kl(sampled_from, estimator, kl):
    sampled = softmax_gradient(
        lambda logp: (sampled_from * kl_per_token(logp, Q.log(), estimator, from_reference=sampled_from is Q)).sum()
    )
    np.testing.assert_allclose(sampled, softmax_gradient(kl), atol=1e-12)


def test_k1_as_a_loss_has_no_gradient_on_average():
    gradient = softmax_gradient(lambda logp: (P * kl_per_token(logp, Q.log(), "k1")).sum())
    np.testing.assert_allclose(gradient, 0, atol=1e-12)


def test_k3_is_not_negative_and_precise_near_0():
    ref = torch.linspace(-1e-3, 1e-3, 101)
    kl = kl_per_token(torch.zeros(101), ref, "k3").double()
    assert kl.min() >= -1e-12
    np.testing.assert_allclose(kl, ref.double().square() / 2, rtol=1e-3, atol=1e-10)


@pytest.mark.parametrize("estimator", FORMULAS)
def test_the_reference_gets_no_gradient(estimator):
    logprobs = torch.zeros(2, requires_grad=True)
    ref = torch.ones(2, requires_grad=True)
    kl_per_token(logprobs, ref, estimator).sum().backward()
    assert logprobs.grad.all() and ref.grad is None


def test_a_nan_is_an_error_and_an_impossible_token_is_bounded():
    with pytest.raises(TrainingError, match=r"^ref_logprobs holds 1 NaN"):
        kl_per_token(torch.zeros(2), torch.tensor([0.0, math.nan]), "k3")
    for pair in ([0.0], [-math.inf]), ([-math.inf], [0.0]):
        assert all(kl_per_token(*map(torch.tensor, pair), name).isfinite() for name in FORMULAS)


@pytest.mark.parametrize(("kl", "expected"), [
    (0.1, 0.5),  # on target
    (0.11, 0.5 * (1 + 0.1 * 64 / 1000)),  # 10 % above
    (9.0, 0.5 * (1 + 0.2 * 64 / 1000)),  # far above: clipped to 20 %
    (-9.0, 0.5 * (1 - 0.2 * 64 / 1000)),
])  # fmt: skip
def test_the_controller_by_hand(kl, expected):
    assert adapt(0.5, kl, target=0.1, horizon=1000, rollouts=64) == pytest.approx(expected)


def test_the_controller_holds_a_kl_that_answers_to_its_coefficient():
    coef = 0.01
    target = 0.3
    for _ in range(3000):
        coef = adapt(coef, 0.06 / coef, target=target, horizon=1000, rollouts=64)
    assert 0.06 / coef == pytest.approx(target, rel=1e-3)


def test_every_estimator_that_can_be_chosen_has_a_formula():
    assert set(FORMULAS) == set(KlConfig.__annotations__["estimator"].__args__)
