"""Reward shaping: from the agent's raw reward to the one that advantages are computed from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shaping:
    """How the rewards of a run are shaped: one length penalty at most, then the clip."""

    max_len: int
    """Tokens of the context."""
    clip_range: tuple[float, float]
    """Low and high."""
    overlong_buffer_len: int | None = None
    """The last tokens of the context, in which a penalty grows from 0 to `overlong_penalty_factor`. None: none."""
    overlong_penalty_factor: float = 1.0
    stop_properly_penalty_coef: float | None = None
    """What the reward of a truncated rollout is multiplied by, or, below 0, what it is. None: its reward."""

    @property
    def formula(self) -> str:
        """`shape_reward` with these numbers, for the header of a run."""
        text = "reward"
        buffer = self.overlong_buffer_len
        coef = self.stop_properly_penalty_coef
        if buffer is not None:
            over = f"clip(longest segment - {self.max_len - buffer}, 0, {buffer}) / {buffer}"
            text = f"reward - {self.overlong_penalty_factor:g} {over}"
        elif coef is not None and coef < 0:
            text = f"{coef:g} if truncated else reward"
        elif coef is not None:
            text = f"{coef:g} reward if truncated else reward"

        low, high = self.clip_range
        return f"clip({text}, {low:g}, {high:g})"


def shape_reward(reward: float, shaping: Shaping, *, peak: int, truncated: bool) -> float:
    """A length penalty, then `clip(reward, low, high)`. The raw reward stays untouched for metrics and filtering.

    overlong, with L = `overlong_buffer_len`: `reward - factor * clip(peak - (max_len - L), 0, L) / L`.
    stop-properly, for a truncated rollout: `reward * coef`, or `coef` itself where `coef < 0`.
    One of them: overlong, if both are given.

    peak: tokens of the longest segment of the rollout, with its prompt.
    Source: overlong, DAPO, arXiv 2503.14476.
    """
    buffer = shaping.overlong_buffer_len
    coef = shaping.stop_properly_penalty_coef
    if buffer is not None:
        into_buffer = peak - (shaping.max_len - buffer)
        over = min(max(into_buffer, 0), buffer)
        reward -= shaping.overlong_penalty_factor * over / buffer
    elif truncated and coef is not None:
        reward = _stopped_by_a_limit(reward, coef)

    low, high = shaping.clip_range
    return min(max(reward, low), high)


def _stopped_by_a_limit(reward: float, coef: float) -> float:
    if coef < 0:
        return coef
    return reward * coef
