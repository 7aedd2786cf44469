"""Expected gradients of the estimators, over every rollout (or every batch) of a toy agent.

What `molt.algo` computes (estimator, ppo with `old = sg(logp)`, weights) goes through autograd, is weighted with the
probability of the rollouts and summed. It must equal the gradient of the expected return where the estimator is
unbiased, and a closed form where it is not. The right-hand sides are central differences or plain loops in NumPy.

The aggregation is seq-mean-token-sum-norm: every rollout has two trained segments, so all denominators are constants.
(token-mean divides by a number of tokens that depends on the actions: a ratio estimator, biased by construction.)
"""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from molt.algo.advantage import ADVANTAGES, whiten, whitening_sums
from molt.algo.importance import correction
from molt.algo.kl import kl_per_token
from molt.algo.loss import LOSSES
from molt.algo.reduce import token_weights
from tests.algo.mdp import LENGTH, STATES, VOCABULARY, Toy, log_policy, slope, toy

_rng = np.random.default_rng(5)
THETA, REFERENCE, BEHAVIOUR = _rng.normal(size=(3, STATES, VOCABULARY))
LINKED = toy(linked=True)
BRANCHES = toy(linked=False)
REWARDS = _rng.choice([-1.0, 0.0, 0.25, 1.0, 2.0], size=len(LINKED.rollouts))
"""Ties on purpose: some groups have equal rewards."""
OTHER_REWARDS = _rng.normal(size=len(LINKED.rollouts))
BOTH = pytest.mark.parametrize("agent", [LINKED, BRANCHES], ids=["linked", "branches"])


def batches_of(agent: Toy, n: int) -> np.ndarray:
    """[K, n]: every batch of n rollouts, as ordered draws."""
    return np.array(list(itertools.product(range(len(agent.rollouts)), repeat=n)))


def expected_ascent(agent: Toy, advantages: Tensor, batches: np.ndarray) -> np.ndarray:
    """`-E[gradient of the loss] * 2 max_len`, over all batches: an ascent direction per *rollout*.

    advantages: [K, n, 2, T], what the estimator gives each token of each batch. The scale undoes the weight
    1 / (2n max_len) of a token, apart from the mean over the n rollouts.
    """
    n = batches.shape[1]
    theta = torch.tensor(THETA, requires_grad=True)
    mask = torch.tensor(agent.mask == 1)[batches].flatten(0, 2)
    logprobs = agent.logprobs(theta)[batches].flatten(0, 2)
    segments = torch.arange(len(mask))[:, None].expand(mask.shape)
    loss, _ = LOSSES["ppo"].fn(logprobs, logprobs.detach(), advantages.flatten(0, 2), mask, segments, low=0.2, high=0.2)
    trained = agent.mask.sum(-1)[batches].reshape(len(batches), -1).tolist()
    weights = [token_weights(t, [0] * len(t), mode="seq-mean-token-sum-norm", max_len=LENGTH) for t in trained]
    chance = torch.tensor(agent.chances(THETA).prod(-1)[batches].prod(-1))
    batch_losses = torch.where(mask, loss, 0.0).sum(-1).reshape(len(batches), 2 * n) * torch.tensor(weights)
    (gradient,) = torch.autograd.grad((chance * batch_losses.sum(-1)).sum(), theta)
    return -gradient.numpy() * 2 * LENGTH


def of_segments(name: str, agent: Toy, rewards=REWARDS, *, kl=None, values=None, gamma=1.0, lam=1.0) -> Tensor:
    """[R, 2, T]: a token estimator on every segment of every rollout."""
    nothing = np.zeros(agent.mask.shape)
    kl, values = nothing if kl is None else kl, nothing if values is None else values
    rows = [
        [
            ADVANTAGES[name].fn(
                float(rewards[r]),
                torch.tensor(agent.mask[r, s] == 1),
                kl=torch.tensor(kl[r, s]),
                values=torch.tensor(values[r, s]),
                gamma=gamma,
                lam=lam,
            )
            for s in range(2)
        ]
        for r in range(len(agent.rollouts))
    ]
    return torch.stack([torch.stack(row) for row in rows])


def of_groups(name: str, agent: Toy, n: int) -> tuple[Tensor, np.ndarray]:
    """[K, n, 2, T] and the batches: a group estimator on every group of n rollouts of one prompt."""
    batches = batches_of(agent, n)
    groups = torch.arange(len(batches)).repeat_interleave(n)
    numbers = ADVANTAGES[name].fn(torch.tensor(REWARDS[batches].ravel()), groups)
    return numbers.reshape(len(batches), n, 1, 1).expand(-1, -1, 2, LENGTH), batches


def penalty(agent: Toy, beta: float) -> np.ndarray:
    """[R, 2, T]: `beta * KL_t` as the trainer computes it, k1."""
    logprobs = agent.logprobs(torch.tensor(THETA))
    return (beta * kl_per_token(logprobs, agent.logprobs(torch.tensor(REFERENCE)), "k1")).numpy()


def expected_return(agent: Toy, theta: np.ndarray, rewards=REWARDS) -> float:
    return float(agent.chances(theta).prod(-1) @ rewards)


def divergence(agent: Toy, theta: np.ndarray) -> float:
    """KL(policy || reference) of whole rollouts: `E[sum over all tokens of log pi - log ref]`."""
    log_ratios = agent.of_tokens(log_policy(theta)) - agent.of_tokens(log_policy(REFERENCE))
    return float(agent.chances(theta).prod(-1) @ log_ratios.sum((1, 2)))


def divergence_by_segment(agent: Toy, theta: np.ndarray) -> float:
    """The sum over segments of KL(segment | its prompt), the distribution of the prompts held at THETA."""
    log_ratios = (agent.of_tokens(log_policy(theta)) - agent.of_tokens(log_policy(REFERENCE))).sum(-1)
    mine = agent.chances(theta)
    held = agent.chances(THETA)
    return float((mine[:, 0] * held[:, 1]) @ log_ratios[:, 0] + (held[:, 0] * mine[:, 1]) @ log_ratios[:, 1])


def exact_values(agent: Toy, kl: np.ndarray) -> np.ndarray:
    """[R, 2, T]: `V = E[R - KL penalties from here to the end of the segment | the segment so far]`.

    That is what a perfect critic knows: it reads one segment, and R arrives at the end of each.
    """
    chances = agent.chances(THETA).prod(-1)
    outcome = {}
    mass = {}
    keys = [
        (r, s, t, (s, tuple(token for token, _ in segment[:t])))
        for r, rollout in enumerate(agent.rollouts)
        for s, segment in enumerate(rollout)
        for t in range(len(segment))
        if segment[t][1] is not None
    ]
    for r, s, t, key in keys:
        outcome[key] = outcome.get(key, 0.0) + chances[r] * (REWARDS[r] - kl[r, s, t:].sum())
        mass[key] = mass.get(key, 0.0) + chances[r]
    values = np.zeros(agent.mask.shape)
    for r, s, t, key in keys:
        values[r, s, t] = outcome[key] / mass[key]
    return values


def close(got: np.ndarray, expected: np.ndarray) -> bool:
    assert np.abs(expected).max() > 0.02, "both sides near 0 would agree about nothing"
    return np.allclose(got, expected, rtol=0, atol=1e-6)


def ascent(agent: Toy, advantages: Tensor) -> np.ndarray:
    """`expected_ascent` of a token estimator: it looks at one rollout, so a batch is one rollout."""
    return expected_ascent(agent, advantages[:, None], batches_of(agent, 1))


def test_the_toy_is_what_it_says():
    # 2 + 2 * 3 first segments, 2 + 3 second ones.
    assert len(LINKED.rollouts) == len(BRANCHES.rollouts) == 8 * 5
    for agent in (LINKED, BRANCHES):
        assert agent.chances(THETA).prod(-1).sum() == pytest.approx(1, abs=1e-12)
        assert set(agent.mask.sum((1, 2)).tolist()) == {2, 3, 4}
    # a tool's token lies between two generated ones
    assert [0, 1, 0, 1] in LINKED.mask[:, 0].tolist()


@BOTH
def test_reinforce_is_the_gradient_of_the_return(agent):
    """Every generated token of every segment gets R: `E[R sum_t grad log pi_t] = grad E[R]`."""
    assert close(ascent(agent, of_segments("reinforce", agent)), slope(lambda th: expected_return(agent, th), THETA))


@pytest.mark.parametrize(
    ("name", "lam"), [("reinforce", 1.0), ("gae", 1.0), ("gae", 0.6)], ids=["reinforce", "gae", "gae-0.6"]
)
@BOTH
def test_a_kl_in_the_reward_is_the_gradient_of_return_minus_kl(agent, name, lam):
    """`A_t = R - beta * sum over u >= t of d_u (- V_t)` gives `grad (E[R] - beta KL)`, KL per segment given its prompt.

    `grad E[sum d_u] = E[sum_t grad log pi_t * sum over u >= t of d_u]`, as `E[grad log pi] = 0`: the d_u of before drop
    out, and so does the derivative of d itself. The sum ends with the segment. In branches that is the KL of the
    rollout; in linked segments what a token does to the KL of *later* segments is not seen: their prompts are given.
    """
    beta = 0.3
    kl = penalty(agent, beta)
    values = exact_values(agent, kl) if name == "gae" else None
    got = ascent(agent, of_segments(name, agent, kl=kl, values=values, lam=lam))
    by_segment = slope(lambda th: expected_return(agent, th) - beta * divergence_by_segment(agent, th), THETA)
    assert close(got, by_segment)
    whole = slope(lambda th: expected_return(agent, th) - beta * divergence(agent, th), THETA)
    assert close(got, whole) == (agent is BRANCHES)


@BOTH
def test_gae_with_lam_1_is_unbiased_with_any_values(agent):
    """The deltas telescope: `A_t = R - V_t`, and `V_t`, known before the token, is a baseline."""
    # A value may know the state, not the token chosen in it.
    values = np.repeat(np.random.default_rng(0).normal(size=(STATES, 1)), VOCABULARY, axis=1)
    got = ascent(agent, of_segments("gae", agent, values=agent.of_tokens(values)))
    assert close(got, slope(lambda th: expected_return(agent, th), THETA))


@pytest.mark.parametrize("lam", [0.0, 0.6, 0.95])
@BOTH
def test_gae_is_unbiased_for_every_lam_with_the_exact_values(agent, lam):
    """`E[delta_t | segment up to t] = Q - V`, and later deltas have expectation 0 given what came before.

    `V_next` is the value after the tool has spoken: its expectation over the tool's answer is Q. At the last token of
    *each* segment `delta = R - V`. Wrong values are a bias for lam < 1.
    """
    expected = slope(lambda th: expected_return(agent, th), THETA)
    values = exact_values(agent, np.zeros(agent.mask.shape))
    assert close(ascent(agent, of_segments("gae", agent, values=values, lam=lam)), expected)
    wrong = ascent(agent, of_segments("gae", agent, values=values * 0.5, lam=lam))
    assert np.abs(wrong - expected).max() > 1e-3


@pytest.mark.parametrize("n", [2, 3])
def test_rloo_is_unbiased(n):
    """The baseline is the mean of the *others*, which are independent of the rollout."""
    got = expected_ascent(LINKED, *of_groups("rloo", LINKED, n))
    assert close(got, slope(lambda th: expected_return(LINKED, th), THETA))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", ["reinforce_baseline", "dr_grpo"])
def test_the_mean_of_the_own_group_shrinks_the_gradient(name, n):
    """`R_i - mean = (n - 1) / n * (R_i - mean of the others)`: the factor (n - 1) / n, the same direction."""
    got = expected_ascent(LINKED, *of_groups(name, LINKED, n))
    assert close(got, (n - 1) / n * slope(lambda th: expected_return(LINKED, th), THETA))


def test_flash_reinforce_shrinks_the_gradient_by_the_batch():
    """`R_i - mean over the N rollouts of the batch`: factor (N - 1) / N, whatever prompts the others come from.

    The batch has one rollout of each of two prompts with different rewards, so a baseline per group would give 0.
    """
    batches = batches_of(LINKED, 2)
    rewards = np.stack([REWARDS, OTHER_REWARDS])
    rows = [ADVANTAGES["flash_reinforce"].fn(torch.tensor(rewards[[0, 1], b]), torch.tensor([0, 1])) for b in batches]
    advantages = torch.stack(rows).reshape(len(batches), 2, 1, 1).expand(-1, -1, 2, LENGTH)
    mean_return = slope(lambda th: sum(expected_return(LINKED, th, r) for r in rewards) / 2, THETA)
    assert close(expected_ascent(LINKED, advantages, batches), (2 - 1) / 2 * mean_return)


@pytest.mark.parametrize("n", [2, 3])
def test_grpo_is_the_return_in_units_of_the_group(n):
    """`sum over groups of P(group) * mean_i (R_i - mean) / (std + 1e-6) * grad log pi(rollout i)`: no gradient of an
    expected return, as the unit differs from group to group; groups of equal rewards give 0."""
    chances = LINKED.chances(THETA).prod(-1)
    score = LINKED.scores(THETA).sum((1, 2))
    expected = np.zeros_like(THETA)
    for group in itertools.product(range(len(chances)), repeat=n):
        rewards = [REWARDS[i] for i in group]
        mean = sum(rewards) / n
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (n - 1))
        if max(rewards) > min(rewards):
            weight = math.prod(chances[i] for i in group) / n
            expected += sum(weight * (r - mean) / (std + 1e-6) * score[i] for r, i in zip(rewards, group, strict=True))
    assert close(expected_ascent(LINKED, *of_groups("grpo", LINKED, n)), expected)


def whitened(agent: Toy, advantages: Tensor, batches: np.ndarray) -> Tensor:
    """[K, n, 2, T]: each batch by its own mean and variance, as `train/` does with the sums of all ranks."""
    masks = torch.tensor(agent.mask == 1)[batches]
    return torch.stack([whiten(a, m, whitening_sums(a, m)) for a, m in zip(advantages, masks, strict=True)])


def expected_whitened(agent: Toy, advantages_of, n: int) -> np.ndarray:
    """`sum over batches of P(batch) * mean_i sum_t (A_it - mean) / sqrt(var + 1e-8) * grad log pi_it`, plain loops.

    `advantages_of(batch)` gives one list of (rollout, segment, token, advantage) of the generated tokens per rollout.
    """
    chances = agent.chances(THETA).prod(-1)
    scores = agent.scores(THETA)
    expected = np.zeros_like(THETA)
    for batch in itertools.product(range(len(chances)), repeat=n):
        tokens = advantages_of(batch)
        mean = sum(a for *_, a in tokens) / len(tokens)
        variance = sum((a - mean) ** 2 for *_, a in tokens) / len(tokens)
        scale = math.prod(chances[i] for i in batch) / n / math.sqrt(variance + 1e-8)
        for r, s, t, a in tokens:
            expected += scale * (a - mean) * scores[r, s, t]
    return expected


def generated(agent: Toy, rollout: int) -> list[tuple[int, int]]:
    return [(s, t) for s in range(2) for t in range(LENGTH) if agent.mask[rollout, s, t]]


def test_whitened_reinforce_is_the_return_in_units_of_the_batch():
    """With gamma 0.9 and a KL in the reward, so that tokens differ: `A_t = sum over u >= t of 0.9^(u - t) r_u`."""
    gamma = 0.9
    beta = 0.3
    batches = batches_of(BRANCHES, 2)
    log_ratios = BRANCHES.of_tokens(log_policy(THETA)) - BRANCHES.of_tokens(log_policy(REFERENCE))

    def discounted(r: int) -> list[tuple[int, int, int, float]]:
        out = []
        for s in range(2):
            follow = 0.0
            arriving = REWARDS[r]
            for t in reversed([t for which, t in generated(BRANCHES, r) if which == s]):
                follow = arriving - beta * log_ratios[r, s, t] + gamma * follow
                arriving = 0.0
                out.append((r, s, t, follow))
        return out

    listed = [discounted(r) for r in range(len(BRANCHES.rollouts))]
    expected = expected_whitened(BRANCHES, lambda batch: [token for r in batch for token in listed[r]], 2)
    advantages = of_segments("reinforce", BRANCHES, kl=penalty(BRANCHES, beta), gamma=gamma)[batches]
    assert close(expected_ascent(BRANCHES, whitened(BRANCHES, advantages, batches), batches), expected)


def test_whitened_reinforce_baseline_is_the_return_in_units_of_the_batch():
    """Whitening is over tokens: a long rollout counts more in the mean, so the centred rewards are centred again."""
    advantages, batches = of_groups("reinforce_baseline", LINKED, 2)

    def centred(batch) -> list[tuple[int, int, int, float]]:
        mean = sum(REWARDS[r] for r in batch) / len(batch)
        return [(r, s, t, REWARDS[r] - mean) for r in batch for s, t in generated(LINKED, r)]

    assert close(
        expected_ascent(LINKED, whitened(LINKED, advantages, batches), batches), expected_whitened(LINKED, centred, 2)
    )


@BOTH
def test_distillation_descends_the_kl_to_the_teacher_in_the_states_it_visits(agent):
    """`A_t = -beta d_t` at its own token alone is `-beta * sum_s visits(s) * grad KL(student(.|s) || teacher(.|s))`.

    The visits are held fixed: what a token does to later divergences is left out. The reward is not read.
    """
    beta = 0.7
    got = ascent(agent, of_segments("on_policy_distill", agent, kl=penalty(agent, beta)))
    visits = agent.visits(THETA)

    def in_visited_states(theta: np.ndarray) -> float:
        student = log_policy(theta)
        teacher = log_policy(REFERENCE)
        return float(visits @ (np.exp(student) * (student - teacher)).sum(-1))

    assert close(got, -beta * slope(in_visited_states, THETA))
    assert not close(got, -beta * slope(lambda th: divergence(agent, th), THETA))


@pytest.mark.parametrize("route", ["importance coefficient", "ppo ratio"])
def test_one_token_episodes_of_another_policy_are_corrected_exactly(route):
    """`E_q[pi / q * R * grad log pi] = grad E_pi[R]` for episodes of one token (state 0, token a, reward r(a)).

    The ratio comes either from the correction (old is the trainer's own, rollout the engine's) or from the ppo ratio
    itself (old is the engine's); every bound is wide. Longer episodes would need the product of all ratios before t.
    """
    rewards = torch.tensor([1.0, -0.5, 2.0])
    theta = torch.tensor(THETA[:1], requires_grad=True)
    logprobs = theta.log_softmax(-1).T  # [3, 1]: one sample of one token for each action
    behaviour = torch.tensor(log_policy(BEHAVIOUR)[:1].T)
    mask = torch.ones(3, 1, dtype=torch.bool)
    segments = torch.arange(3)[:, None]
    old = behaviour if route == "ppo ratio" else logprobs.detach()
    loss, _ = LOSSES["ppo"].fn(logprobs, old, rewards[:, None], mask, segments, low=0.999, high=1e3)
    if route == "importance coefficient":
        band = {"level": "token", "mode": "mask", "low": 0.0, "high": 1e3}
        loss = loss * correction(old, behaviour, mask, segments, **band)[0]
    (gradient,) = torch.autograd.grad((behaviour.exp() * loss).sum(), theta)
    expected = slope(lambda th: float(np.exp(log_policy(th))[0] @ rewards.numpy()), THETA[:1])
    assert close(-gradient.numpy(), expected)
