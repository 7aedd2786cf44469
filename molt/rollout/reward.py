"""The reward as a stage of its own: from a finished trajectory to a score, in the process of a runner.

    episode ──► trajectory ──► cache ──► scorer process ──► reward, score, info

`trajectory_of` says what a scorer is given. A score that fails is repeated on the same trajectory, `SCORE_ATTEMPTS`
times in all; only then is the rollout sampled anew, which counts as one of its `rollout.max_retries`.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from molt.agents.episode import Episode
from molt.agents.trajectory import Trajectory, json_part
from molt.config import RewardConfig, RolloutConfig
from molt.errors import AgentError
from molt.rollout.score_cache import ScoreCache
from molt.rollout.scorer_pool import ScorerPool
from molt.types import InfraFailure, Json, PolicyFailure, Prompt, Sample, Scored

SCORE_ATTEMPTS = 3
"""At the score of one trajectory."""

OpenJudge = Callable[[], AbstractAsyncContextManager[str]]
"""Opens the address of a judge for as long as a score takes."""


@dataclass(frozen=True)
class Grade:
    """What a scorer says of a trajectory."""

    outcome: Scored | PolicyFailure
    info: dict[str, float] = field(default_factory=dict)
    is_cached: bool | None = None
    """None: there is no cache."""


def scoring_s(rollout: RolloutConfig, reward: RewardConfig) -> float:
    """Seconds within which a trajectory has its score, or has failed: its calls, and the wait for a process."""
    if reward.scorer is None:
        return 0.0
    return rollout.timeout_s + SCORE_ATTEMPTS * reward.scorer_timeout_s


class RewardStage:
    """Owns the processes of a scorer, and the cache of its scores."""

    def __init__(self, scorer: str, config: RewardConfig):
        self.pool = ScorerPool(scorer, config.num_scorers, config.scorer_timeout_s)
        self.cache = None
        if config.cache_dir is not None:
            self.cache = ScoreCache(config.cache_dir, self.pool.digest)

    async def ready(self) -> None:
        """Raises `AgentError` if the scorer cannot be loaded here."""
        try:
            await self.pool.facts()
        except InfraFailure as failure:
            raise AgentError(failure.detail) from None

    async def score(self, trajectory: str, open_judge: OpenJudge, failures: list[InfraFailure]) -> Grade:
        """The score of a trajectory (canonical JSON); what fails before it is appended to `failures`.

        Raises the `InfraFailure` of the last of `SCORE_ATTEMPTS`.
        """
        if self.cache is None:
            return _grade(await self._call(trajectory, open_judge, failures), is_cached=None)
        kept = await self.cache.get(trajectory)
        if kept is not None:
            return _grade(kept, is_cached=True)
        message = await self._call(trajectory, open_judge, failures)
        grade = _grade(message, is_cached=False)
        await self.cache.put(trajectory, _kept(message))
        return grade

    async def close(self) -> None:
        await self.pool.close()

    async def _call(self, trajectory: str, open_judge: OpenJudge, failures: list[InfraFailure]) -> Json:
        for _ in range(SCORE_ATTEMPTS - 1):
            try:
                return await self._call_once(trajectory, open_judge)
            except InfraFailure as failure:
                failures.append(failure)
        return await self._call_once(trajectory, open_judge)

    async def _call_once(self, trajectory: str, open_judge: OpenJudge) -> Json:
        facts = await self.pool.facts()
        if not facts.wants_judge:
            return await self.pool.call(trajectory)
        async with open_judge() as judge_url:
            return await self.pool.call(trajectory, judge_url)


def _grade(message: Json, *, is_cached: bool | None) -> Grade:
    """message: of a scorer's process, or what was kept of it."""
    reason = message.get("reason")
    if reason is not None:
        return Grade(PolicyFailure(message["reward"], reason), is_cached=is_cached)
    return Grade(Scored(message["reward"], message["score"]), message["info"], is_cached)


def _kept(message: Json) -> Json:
    """The part of a message that the cache keeps."""
    return {name: value for name, value in message.items() if name in ("reward", "score", "info", "reason")}


# What a scorer is given.


def trajectory_of(prompt: Prompt, episode: Episode, samples: list[Sample]) -> Trajectory:
    """The episode of a prompt, as a scorer gets it. samples: those of the episode."""
    conversation = prompt.text if prompt.messages is None else prompt.messages
    assert conversation is not None, "a prompt has a text or messages"
    return Trajectory(
        prompt=conversation,
        label=prompt.label,
        data_source=prompt.data_source,
        tools=prompt.tools,
        branches=_numbered_calls(_branches(episode)),
        turns=_turns(episode),
        prompt_tokens=_prompt_tokens(samples),
        generated_tokens=sum(int(sample.mask.sum()) for sample in samples),
        context_tokens=max((len(sample.token_ids) for sample in samples), default=0),
        cut_reason=episode.cut,
        info=json_part(episode.returned_info),
        agent_reward=episode.outcome.reward,
        agent_score=episode.outcome.score,
    )


def as_json(trajectory: Trajectory) -> str:
    """Canonical JSON. Raises `InfraFailure` if a dataset has something that JSON cannot hold."""
    try:
        return trajectory.to_json()
    except (TypeError, ValueError) as error:
        raise InfraFailure("scorer_input", f"the trajectory cannot be given to a scorer: {error}") from error


def _branches(episode: Episode) -> list[list[Json]]:
    tree = episode.tree
    if tree is not None:
        return [tree.messages(leaf) for leaf in tree.leaves()]
    if episode.turns:
        return [episode.messages]
    return []


def _turns(episode: Episode) -> int:
    if episode.tree is not None:  # without calls that were repeated for a client that went away
        return len(episode.tree.nodes)
    return len(episode.turns)


def _prompt_tokens(samples: list[Sample]) -> int:
    if not samples or not samples[0].mask.any():
        return 0
    return int(np.argmax(samples[0].mask))


def _numbered_calls(branches: list[list[Json]]) -> list[list[Json]]:
    """The messages with `call_0`, `call_1`, ... for the ids of tool calls, which are random."""
    numbers: dict[Any, str] = {}

    def number(call_id: Any) -> str:
        return numbers.setdefault(call_id, f"call_{len(numbers)}")

    def numbered(message: Json) -> Json:
        if message.get("tool_calls"):
            calls = [call | {"id": number(call.get("id"))} for call in message["tool_calls"]]
            message = message | {"tool_calls": calls}
        if message.get("tool_call_id") is not None:
            message = message | {"tool_call_id": number(message["tool_call_id"])}
        return message

    return [[numbered(message) for message in branch] for branch in branches]
