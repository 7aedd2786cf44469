"""Reward shaping: from the agent's raw reward to the one that advantages are computed from."""


def shape_reward(
    reward: float,
    *,
    peak: int,
    truncated: bool,
    max_len: int,
    clip_range: tuple[float, float],
    overlong_buffer_len: int | None = None,
    overlong_penalty_factor: float = 1.0,
    stop_properly_penalty_coef: float | None = None,
) -> float:
    """A length penalty, then `clip(reward, low, high)`. The raw reward stays untouched for metrics and filtering.

    overlong, with L = `overlong_buffer_len`: `reward - factor * clip(peak - (max_len - L), 0, L) / L`.
    stop-properly, for a truncated rollout: `reward * coef`, or `coef` itself where `coef < 0`.
    One of them: overlong, if both are given.

    peak: tokens of the longest segment of the rollout, with its prompt. max_len: tokens of the context.
    Source: overlong, DAPO, arXiv 2503.14476.
    """
    if overlong_buffer_len is not None:
        into_buffer = peak - (max_len - overlong_buffer_len)
        over = min(max(into_buffer, 0), overlong_buffer_len)
        reward -= overlong_penalty_factor * over / overlong_buffer_len
    elif truncated and stop_properly_penalty_coef is not None:
        reward = _stopped_by_a_limit(reward, stop_properly_penalty_coef)

    low, high = clip_range
    return min(max(reward, low), high)


def _stopped_by_a_limit(reward: float, coef: float) -> float:
    if coef < 0:
        return coef
    return reward * coef
