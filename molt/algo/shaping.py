"""Reward shaping: from the agent's raw reward to the one that advantages are computed from."""


def shape_reward(reward: float, *, clip_range: tuple[float, float]) -> float:
    """`clip(reward, low, high)`. The raw reward stays untouched for metrics, evaluation and filtering."""
    low, high = clip_range
    return min(max(reward, low), high)
