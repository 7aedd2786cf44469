"""Score centering against a float64 loop, and over every rollout of the toy agent with a stale sampler."""

import math

import numpy as np
import pytest
import torch

from molt.algo.centering import SMALLEST_TAIL, centered_loss, unweighted, weighting
from tests.algo.mdp import STATES, VOCABULARY, log_policy, toy

_rng = np.random.default_rng(11)
THETA, BEHAVIOUR = _rng.normal(size=(2, STATES, VOCABULARY))
AGENT = toy(linked=True)
REWARDS = _rng.normal(size=len(AGENT.rollouts))
MASK = torch.tensor(AGENT.mask == 1)
STATE_OF = torch.tensor(AGENT._lay_out(lambda token, state: state or 0))

WEIGHTINGS = {
    "off": lambda ratio: 1.0,
    "mask": lambda ratio: ratio if 0.5 <= ratio <= 2 else 0.0,
    "clip": lambda ratio: min(max(ratio, 0.5), 2),
    "trunc": lambda ratio: min(ratio, 2),
}
"""`f`, written again for numbers, with the band 0.5 to 2."""


def weight_of(mode):
    return weighting("off" if mode == "off" else "token", mode, 0.5, 2.0)


def gradient_by_hand(p, q, token, candidates, advantage, f):
    """d loss / d logits of one token, in a loop: the derivative of log p_v is onehot(v) - p."""

    def score(v):
        return np.eye(len(p))[v] - p

    rho = max(1 - sum(q[v] for v in candidates), SMALLEST_TAIL) / max(1 - sum(p[v] for v in candidates), SMALLEST_TAIL)
    alpha = rho * f(1 / rho)
    center = sum((q[v] * f(p[v] / q[v]) - alpha * p[v]) * score(v) for v in candidates)
    return -advantage * (f(p[token] / q[token]) * score(token) - center)


@pytest.mark.parametrize("mode", WEIGHTINGS)
@pytest.mark.parametrize("k", [1, 3, 7])
def test_the_gradient_is_that_of_the_formula(mode, k):
    rng = np.random.default_rng(k)
    logits, sampler_logits = rng.normal(size=(2, 5, 7))
    q = np.exp(log_policy(sampler_logits))
    p = np.exp(log_policy(logits))
    tokens = rng.integers(0, 7, 5)
    candidates = np.argsort(-q, axis=1)[:, :k]
    advantages = rng.normal(size=5)

    theta = torch.tensor(logits, requires_grad=True)
    logp = theta.log_softmax(-1)
    at = torch.arange(5)
    loss = centered_loss(
        logp[at, tokens],
        logp.gather(1, torch.tensor(candidates)),
        torch.tensor(advantages),
        torch.tensor(np.log(q))[at, tokens],
        torch.tensor(np.log(q)).gather(1, torch.tensor(candidates)),
        torch.ones(5, dtype=torch.bool),
        weight=weight_of(mode),
    )
    (got,) = torch.autograd.grad(loss.sum(), theta)
    want = [gradient_by_hand(p[t], q[t], tokens[t], candidates[t], advantages[t], WEIGHTINGS[mode]) for t in range(5)]
    assert np.allclose(got.numpy(), np.array(want), rtol=0, atol=1e-12)


def test_one_token_by_hand():
    # p = q = (1/2, 1/4, 1/4), y = 0, H = {0}, A = 2: alpha = 1, so the center is (1/2 - 1/2) log p_0 = 0 and the loss
    # is -2 log(1/2).
    half = torch.tensor([math.log(0.5)], dtype=torch.float64)
    loss = centered_loss(half, half[:, None], torch.tensor([2.0]), half, half[:, None], torch.tensor([True]))
    assert loss.item() == pytest.approx(2 * math.log(2))
    # q = (4/5, 1/10, 1/10): rho = (1/5) / (1/2) = 0.4, alpha = 0.4, center = (0.8 - 0.4 * 0.5) log(1/2) = 0.6 log(1/2):
    # the loss is -2 (1 - 0.6) log(1/2).
    sampler = torch.tensor([math.log(0.8)], dtype=torch.float64)
    loss = centered_loss(half, half[:, None], torch.tensor([2.0]), sampler, sampler[:, None], torch.tensor([True]))
    assert loss.item() == pytest.approx(0.8 * math.log(2))


def test_outside_the_mask_there_is_neither_loss_nor_nan():
    logprobs = torch.tensor([-0.5, 0.0], requires_grad=True)
    candidates = torch.tensor([[-0.5, -1.5], [0.0, 0.0]], requires_grad=True)
    rollout_candidates = torch.tensor([[-0.4, -1.6], [-math.inf, -math.inf]])
    mask = torch.tensor([True, False])
    loss = centered_loss(logprobs, candidates, torch.ones(2), torch.tensor([-0.4, 0.0]), rollout_candidates, mask)
    gradients = torch.autograd.grad(loss.sum(), (logprobs, candidates))
    assert loss[1] == 0 and all(g.isfinite().all() and (g[1] == 0).all() for g in gradients)


def expected_ascent(rewards, k, weight, sampler):
    """`-E[gradient]` over every rollout that the sampler draws, with its k likeliest tokens as candidates."""
    theta = torch.tensor(THETA, requires_grad=True)
    logp = theta.log_softmax(-1)
    log_q = torch.tensor(log_policy(sampler))
    top = log_q.argsort(-1, descending=True)[:, :k]
    loss = centered_loss(
        AGENT.logprobs(theta),
        logp.gather(1, top)[STATE_OF],
        torch.tensor(rewards)[:, None, None].expand(MASK.shape),
        AGENT.logprobs(torch.tensor(sampler)),
        log_q.gather(1, top)[STATE_OF],
        MASK,
        weight=weight,
    )
    chances = torch.tensor(AGENT.chances(sampler).prod(-1))
    (gradient,) = torch.autograd.grad((chances * loss.sum((1, 2))).sum(), theta)
    return -gradient.numpy()


@pytest.mark.parametrize("mode", WEIGHTINGS)
def test_equal_rewards_move_nothing_although_the_sampler_is_stale(mode):
    """Without centering the same rewards do move the policy."""
    equal = np.ones(len(AGENT.rollouts))
    assert np.abs(expected_ascent(equal, VOCABULARY, weight_of(mode), BEHAVIOUR)).max() < 1e-9
    drift = expected_ascent(equal, VOCABULARY, weight_of(mode), BEHAVIOUR) - uncentered(equal, weight_of(mode))
    assert np.abs(drift).max() > 0.05


@pytest.mark.parametrize("k", [1, 2, 3])
def test_equal_rewards_of_the_policy_itself_move_nothing_for_any_k(k):
    equal = np.ones(len(AGENT.rollouts))
    assert np.abs(expected_ascent(equal, k, unweighted, THETA)).max() < 1e-12


def uncentered(rewards, weight):
    """The same expectation of `A f(p/q) grad log p` alone."""
    ratio = torch.tensor(np.exp(AGENT.of_tokens(log_policy(THETA)) - AGENT.of_tokens(log_policy(BEHAVIOUR))))
    coefficients = (weight(ratio).numpy() * AGENT.mask * rewards[:, None, None])[..., None, None]
    chances = AGENT.chances(BEHAVIOUR).prod(-1)[:, None, None, None, None]
    return (chances * coefficients * AGENT.scores(THETA)).sum((0, 1, 2))


@pytest.mark.parametrize("mode", WEIGHTINGS)
def test_it_is_unbiased_once_the_candidates_are_the_vocabulary(mode):
    """Centering subtracts a constant times a mean of zero... written out: the covariance of reward and score.

    By hand: sum over rollouts of the sampler's chance times R times (f grad log p - its mean over the sampler's draws
    in that state).
    """
    rewards = REWARDS
    weight = weight_of(mode)
    p = np.exp(log_policy(THETA))
    q = np.exp(log_policy(BEHAVIOUR))
    mean = np.zeros((STATES, STATES, VOCABULARY))
    for state in range(STATES):
        for v in range(VOCABULARY):
            f = WEIGHTINGS[mode](p[state, v] / q[state, v])
            mean[state, state] += q[state, v] * f * (np.eye(VOCABULARY)[v] - p[state])
    chances = AGENT.chances(BEHAVIOUR).prod(-1)[:, None, None, None, None]
    means = mean[STATE_OF.numpy()] * AGENT.mask[..., None, None] * rewards[:, None, None, None, None]
    want = uncentered(rewards, weight) - (chances * means).sum((0, 1, 2))
    got = expected_ascent(rewards, VOCABULARY, weight, BEHAVIOUR)
    assert np.abs(want).max() > 0.02
    assert np.allclose(got, want, rtol=0, atol=1e-9)
