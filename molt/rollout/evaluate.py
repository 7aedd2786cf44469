"""Evaluation: every prompt of the held-out set, at one version, scored by the agent."""

import asyncio
from collections import Counter
from collections.abc import Sequence

from molt.algo.interval import mean_interval
from molt.algo.passk import pass_at_k
from molt.config import EvalConfig, RolloutConfig
from molt.rollout.group_task import GroupTask, group_task
from molt.rollout.runner_pool import RunnerPool
from molt.types import InfraFailure, Metric, Prompt, RolloutInfo

EPOCH = -1
"""Evaluation has an epoch of its own, so its sampling seeds never meet those of training."""

Answers = dict[str, list[list[RolloutInfo]]]
"""By data source and prompt: the rollouts that were asked for, each with an outcome or a failure."""


async def evaluate(
    prompts: Sequence[Prompt], runners: RunnerPool, rollout: RolloutConfig, config: EvalConfig
) -> dict[str, Metric]:
    """Roll out and score; see `answer` and `score`."""
    return score(await answer(prompts, runners, rollout, config))


async def answer(prompts: Sequence[Prompt], runners: RunnerPool, rollout: RolloutConfig, config: EvalConfig) -> Answers:
    """Roll out all prompts, `eval.batch_size` at a time; unset: as many rollouts as are in flight in training.

    The same prompt and rollout get the same seed every time, whatever the version.
    """
    tasks = [group_task(prompt, rollout, config) for prompt in prompts]
    n = config.n_samples_per_prompt or rollout.n_samples_per_prompt
    in_flight = (rollout.vllm_generate_batch_size or rollout.batch_size) * rollout.n_samples_per_prompt
    limit = asyncio.Semaphore(config.batch_size or max(1, in_flight // n))

    async def run(task: GroupTask) -> list[RolloutInfo]:
        async with limit:
            try:
                result, _ = await runners.run_group(task)
            except InfraFailure as failure:
                return _lost(task, failure)
            return _lost(task, InfraFailure("unusable_prompt", result.unusable)) if result.unusable else result.rollouts

    answers: Answers = {prompt.data_source: [] for prompt in prompts}
    for prompt, rollouts in zip(prompts, await asyncio.gather(*map(run, tasks)), strict=True):
        answers[prompt.data_source].append(rollouts)
    return answers


def score(answers: Answers) -> dict[str, Metric]:
    """`eval/<source>/pass1` with its 95 % interval, `pass<n>`, response length, truncation, failures, per data source.

    `pass1` is the mean over prompts of the mean score, its interval that of `mean_interval`; `pass<n>` as in
    `pass_at_k`. A rollout that the infrastructure failed is left out and counted, never a score of 0; a source
    without any other has no `pass1`.
    """
    return {f"eval/{source}/{k}": v for source, groups in answers.items() for k, v in _score(groups).items()}


def failures(answers: Answers) -> tuple[Counter[str], dict[str, str]]:
    """The rollouts without a result, counted by reason, and one detail of each reason."""
    lost = [r.outcome for groups in answers.values() for rollouts in groups for r in rollouts if _failed(r)]
    return Counter(failure.reason for failure in lost), {failure.reason: failure.detail for failure in lost}


def _lost(task: GroupTask, failure: InfraFailure) -> list[RolloutInfo]:
    return [RolloutInfo(task.prompt.group_id, index, failure, False, 0, ()) for index in range(task.n)]


def _failed(rollout: RolloutInfo) -> bool:
    return isinstance(rollout.outcome, InfraFailure)


def _score(groups: Sequence[Sequence[RolloutInfo]]) -> dict[str, Metric]:
    scored = [[r for r in rollouts if not _failed(r)] for rollouts in groups]
    scores = [[r.outcome.score for r in rollouts] for rollouts in scored if rollouts]
    means = [pass_at_k(s, 1) for s in scores]
    done = [r for rollouts in scored for r in rollouts]
    metrics = {
        "pass1": Metric(sum(means), len(means)),
        "response_length": Metric(sum(r.generated_tokens for r in done), len(done)),
        "truncated": Metric(sum(r.truncated for r in done), len(done)),
        "failures": Metric(sum(map(len, groups)) - len(done)),
    }
    if means and (interval := mean_interval(means)):
        metrics["pass1_low"], metrics["pass1_high"] = map(Metric, interval)
    n = len(groups[0])
    full = [s for s in scores if len(s) == n]
    if n > 1 and full:
        metrics[f"pass{n}"] = Metric(sum(pass_at_k(s, n) for s in full), len(full))
    return metrics
