"""Evaluation: every prompt of the held-out set, at one policy version, scored by the agent."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from molt.algo.interval import mean_interval
from molt.algo.passk import pass_at_k
from molt.config import EvalConfig, RolloutConfig
from molt.rollout.group_task import GroupResult, GroupTask, group_task
from molt.types import InfraFailure, Metric, Prompt, RolloutInfo

Rollouts = list[RolloutInfo]
Answers = dict[str, list[Rollouts]]
"""By data source and prompt: the rollouts, each with an outcome or a failure."""


class Runners(Protocol):
    """The runners as an evaluation sees them."""

    async def run_group(self, task: GroupTask) -> tuple[GroupResult, Any]: ...


async def evaluate(
    prompts: Sequence[Prompt], runners: Runners, rollout: RolloutConfig, config: EvalConfig
) -> dict[str, Metric]:
    """Roll out all prompts and score them; see `answer` and `score`."""
    return score(await answer(prompts, runners, rollout, config))


async def answer(prompts: Sequence[Prompt], runners: Runners, rollout: RolloutConfig, config: EvalConfig) -> Answers:
    """Roll out all prompts, `eval.batch_size` at a time; unset: as many rollouts as are in flight in training.

    The same prompt and rollout get the same seed every time, whatever the version.
    """
    limit = asyncio.Semaphore(_prompts_in_flight(rollout, config))

    async def run(prompt: Prompt) -> Rollouts:
        task = group_task(prompt, rollout, config)
        async with limit:
            return await _run(task, runners)

    rollouts_of_prompts = await asyncio.gather(*(run(prompt) for prompt in prompts))
    answers: Answers = {}
    for prompt, rollouts in zip(prompts, rollouts_of_prompts, strict=True):
        answers.setdefault(prompt.data_source, []).append(rollouts)
    return answers


def score(answers: Answers) -> dict[str, Metric]:
    """`eval/<source>/pass1` with its 95 % interval, `pass<n>`, response length, truncation, failures, per data source.

    `pass1` is the mean over prompts of the mean score, its interval that of `mean_interval`; `pass<n>` as in
    `pass_at_k`. A rollout that failed by infrastructure is left out and counted, never a score of 0; a source without
    any other has no `pass1`.
    """
    metrics: dict[str, Metric] = {}
    for source, groups in answers.items():
        for name, metric in _score(groups).items():
            metrics[f"eval/{source}/{name}"] = metric
    return metrics


def failures(answers: Answers) -> tuple[Counter[str], dict[str, str]]:
    """The rollouts without a result, counted by reason, and one detail for each reason."""
    reasons: Counter[str] = Counter()
    details: dict[str, str] = {}
    for groups in answers.values():
        for rollout in _flat(groups):
            if isinstance(rollout.outcome, InfraFailure):
                reasons[rollout.outcome.reason] += 1
                details[rollout.outcome.reason] = rollout.outcome.detail
    return reasons, details


def _prompts_in_flight(rollout: RolloutConfig, config: EvalConfig) -> int:
    if config.batch_size is not None:
        return config.batch_size
    groups_in_training = rollout.vllm_generate_batch_size or rollout.batch_size
    rollouts_in_training = groups_in_training * rollout.n_samples_per_prompt
    rollouts_per_prompt = config.n_samples_per_prompt or rollout.n_samples_per_prompt
    return max(1, rollouts_in_training // rollouts_per_prompt)


async def _run(task: GroupTask, runners: Runners) -> Rollouts:
    """The rollouts of one prompt; failures where there are no results."""
    try:
        result, _ = await runners.run_group(task)
    except InfraFailure as failure:
        return _failed_rollouts(task, failure)
    if result.unusable:
        return _failed_rollouts(task, InfraFailure("unusable_prompt", result.unusable))
    if result.replaced is not None:
        return _failed_rollouts(task, InfraFailure(result.replaced.reason, result.replaced.detail))
    return result.rollouts


def _failed_rollouts(task: GroupTask, failure: InfraFailure) -> Rollouts:
    return [RolloutInfo(task.prompt.group_id, index, failure, cut=None, turns=0, samples=()) for index in range(task.n)]


def _flat(groups: Sequence[Rollouts]) -> Rollouts:
    return [rollout for rollouts in groups for rollout in rollouts]


def _score(groups: Sequence[Rollouts]) -> dict[str, Metric]:
    """The metrics of one data source."""
    scores_of_prompts = []
    for rollouts in groups:
        scores = [rollout.score for rollout in rollouts if not rollout.failed]
        if scores:
            scores_of_prompts.append(scores)
    means = [pass_at_k(scores, 1) for scores in scores_of_prompts]
    every = _flat(groups)
    done = [rollout for rollout in every if not rollout.failed]
    metrics = {
        "pass1": Metric(sum(means), len(means)),
        "response_length": Metric(sum(rollout.generated_tokens for rollout in done), len(done)),
        "truncated": Metric(sum(rollout.truncated for rollout in done), len(done)),
        "failures": Metric(len(every) - len(done)),
    }
    interval = mean_interval(means) if means else None
    if interval is not None:
        low, high = interval
        metrics["pass1_low"] = Metric(low)
        metrics["pass1_high"] = Metric(high)
    hits = [rollout.scoring.is_cached for rollout in done if rollout.scoring and rollout.scoring.is_cached is not None]
    if hits:
        metrics["score_cached"] = Metric(sum(hits), len(hits))
    n = len(groups[0])
    complete = [scores for scores in scores_of_prompts if len(scores) == n]
    if n > 1 and complete:
        metrics[f"pass{n}"] = Metric(sum(pass_at_k(scores, n) for scores in complete), len(complete))
    return metrics
