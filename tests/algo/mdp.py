"""A toy agent small enough to list every rollout, with a tabular softmax policy over three tokens, in float64.

    segment 0:  prompt a [tool b]     the tool answers a = 0 with 3 or 4, by chance; its token is not generated
    segment 1:  prompt c [d]          d follows c = 0

Five decisions are made in six states: a in 0, b in 1 or 2 (what the tool said), c in 3 or 4, d in 5. In a *linked* toy
the second prompt says whether a was 0 (an agent's next turn), else it is the same always (a parallel branch).
Everything outside `logprobs` is NumPy and plain Python: the reference that the functions of `molt.algo` are held to.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

VOCABULARY = 3
STATES = 6
LENGTH = 4
PROMPT = 9
TOOL = {3: 0.3, 4: 0.7}

Segment = tuple[tuple[int, int | None], ...]
"""(token, the state in which the policy chose it); state None: not generated."""


def _first_segments() -> Iterator[tuple[Segment, float]]:
    """The segment, and the probability of what its tool said."""
    start = (PROMPT, None)
    for a in range(1, VOCABULARY):
        yield (start, (a, 0)), 1.0
    for said, luck in TOOL.items():
        for b in range(VOCABULARY):
            yield (start, (0, 0), (said, None), (b, said - 2)), luck


def _second_segments(prompt: int) -> Iterator[Segment]:
    start = (prompt, None)
    state = 4 if prompt == PROMPT + 1 else 3
    for c in range(1, VOCABULARY):
        yield start, (c, state)
    for d in range(VOCABULARY):
        yield start, (0, state), (d, 5)


@dataclass(frozen=True)
class Toy:
    """Every rollout of the toy agent. Arrays are [rollout, segment, token]."""

    rollouts: list[tuple[Segment, Segment]]
    luck: np.ndarray
    """[R]: the probability of what the tool said."""

    @cached_property
    def mask(self) -> np.ndarray:
        """[R, 2, T] of 0 and 1: the generated tokens."""
        return self._lay_out(lambda token, state: state is not None)

    def _lay_out(self, entry: Callable[[int, int | None], float]) -> np.ndarray:
        out = np.zeros((len(self.rollouts), 2, LENGTH))
        for r, rollout in enumerate(self.rollouts):
            for s, segment in enumerate(rollout):
                out[r, s, : len(segment)] = [entry(token, state) for token, state in segment]
        return out.astype(int)

    def of_tokens(self, table: np.ndarray) -> np.ndarray:
        """[R, 2, T]: `table[state, token]` at generated tokens, else 0."""
        out = np.zeros((len(self.rollouts), 2, LENGTH))
        for r, rollout in enumerate(self.rollouts):
            for s, segment in enumerate(rollout):
                for t, (token, state) in enumerate(segment):
                    out[r, s, t] = 0.0 if state is None else table[state, token]
        return out

    def logprobs(self, theta: Tensor) -> Tensor:
        """float64 [R, 2, T] with gradient: what the model's forward pass gives the trainer; 0 outside the mask."""
        states = torch.tensor(self._lay_out(lambda token, state: state or 0))
        tokens = torch.tensor(self._lay_out(lambda token, state: 0 if state is None else token))
        return torch.where(torch.tensor(self.mask == 1), theta.log_softmax(-1)[states, tokens], 0.0)

    def chances(self, theta: np.ndarray) -> np.ndarray:
        """[R, 2]: the probability of each segment, given its prompt."""
        chances = np.exp(self.of_tokens(log_policy(theta)).sum(-1))
        chances[:, 0] *= self.luck
        return chances

    def scores(self, theta: np.ndarray) -> np.ndarray:
        """[R, 2, T, states, vocabulary]: `d log pi(token) / d theta` = one-hot(token) - pi in the row of its state."""
        out = np.zeros((len(self.rollouts), 2, LENGTH, *theta.shape))
        for r, rollout in enumerate(self.rollouts):
            for s, segment in enumerate(rollout):
                for t, (token, state) in enumerate(segment):
                    if state is not None:
                        out[r, s, t, state] = np.eye(VOCABULARY)[token] - np.exp(log_policy(theta)[state])
        return out

    def visits(self, theta: np.ndarray) -> np.ndarray:
        """[states]: how often a rollout of the policy is expected to decide in each state."""
        out = np.zeros(STATES)
        chances = self.chances(theta).prod(-1)
        for rollout, chance in zip(self.rollouts, chances, strict=True):
            for _, state in (token for segment in rollout for token in segment):
                if state is not None:
                    out[state] += chance
        return out


def toy(*, linked: bool) -> Toy:
    listed = [
        ((first, second), luck)
        for first, luck in _first_segments()
        for second in _second_segments(PROMPT + 1 if linked and first[1][0] == 0 else PROMPT)
    ]
    return Toy([rollout for rollout, _ in listed], np.array([luck for _, luck in listed]))


def log_policy(theta: np.ndarray) -> np.ndarray:
    """Row-wise log-softmax."""
    return theta - np.log(np.exp(theta).sum(-1, keepdims=True))


def slope(f: Callable[[np.ndarray], float], theta: np.ndarray, step: float = 1e-4) -> np.ndarray:
    """Gradient of `f` by central differences; the error is of the order step^2."""
    out = np.zeros_like(theta)
    for index in np.ndindex(*theta.shape):
        shift = np.zeros_like(theta)
        shift[index] = step
        out[index] = (f(theta + shift) - f(theta - shift)) / (2 * step)
    return out
