"""What a runner is asked to do, and the light part of what it answers."""

from dataclasses import dataclass, replace
from typing import TypeVar

from molt.config import EvalConfig, RolloutConfig
from molt.types import InfraFailure, Prompt, ReplaceGroup, RolloutInfo, Unscored

Value = TypeVar("Value")


@dataclass(frozen=True)
class GroupTask:
    """One prompt to roll out `n` times, and the distribution to sample from."""

    prompt: Prompt
    n: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int | None
    by_scheme: bool = False
    """Whether `rollout.scheme` says which rollout runs when; in an evaluation none knows of another."""


@dataclass(frozen=True)
class GroupResult:
    """The light part of a group: finished, or past generation while some of its rollouts wait for their scores."""

    rollouts: list[RolloutInfo]
    unusable: str | None = None
    """Why the prompt cannot be rolled out at all, such as being longer than the context."""
    node: str = ""
    """Where the heavy part is, by Ray's id."""
    replaced: ReplaceGroup | None = None
    """The agent does not want the group to be trained."""
    failure: InfraFailure | None = None
    """Its scheme failed; there are only the rollouts that had ended."""
    sampling: tuple[int, ...] = ()
    """The rollouts that are sampled anew, because their score failed; they have that failure as outcome."""
    progress: str = ""
    """What the runner knows the group by (`GroupProgress.key`), as long as it is not finished."""

    @property
    def is_finished(self) -> bool:
        """Whether every rollout has a reward, or has failed for good."""
        if self.sampling:
            return False
        return not any(isinstance(rollout.outcome, Unscored) for rollout in self.rollouts)


def group_task(prompt: Prompt, rollout: RolloutConfig, overrides: EvalConfig | None = None) -> GroupTask:
    """The rollouts of `prompt` under `rollout`; what `overrides` sets takes precedence."""
    task = GroupTask(
        prompt=prompt,
        n=rollout.n_samples_per_prompt,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_new_tokens,
        by_scheme=rollout.scheme is not None and overrides is None,
    )
    if overrides is None:
        return task
    return replace(
        task,
        n=_if_set(overrides.n_samples_per_prompt, task.n),
        temperature=_if_set(overrides.temperature, task.temperature),
        top_p=_if_set(overrides.top_p, task.top_p),
        max_new_tokens=_if_set(overrides.max_new_tokens, task.max_new_tokens),
    )


def _if_set(value: Value | None, default: Value) -> Value:
    return default if value is None else value
