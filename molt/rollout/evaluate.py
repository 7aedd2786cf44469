"""Evaluation: every prompt of the held-out set, at one version, scored by the agent."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from molt.algo.passk import pass_at_k
from molt.config import EvalConfig, RolloutConfig
from molt.rollout.producer import RunnerPool
from molt.rollout.runner_worker import GroupTask, group_task
from molt.types import InfraFailure, Metric, Prompt, RolloutInfo

EPOCH = -1
"""Evaluation has an epoch of its own, so its sampling seeds never meet those of training."""


async def evaluate(
    prompts: Sequence[Prompt], runners: RunnerPool, rollout: RolloutConfig, config: EvalConfig
) -> dict[str, Metric]:
    """`eval/<source>/pass1`, `pass<n>`, response length, truncation and failures, per data source.

    `pass1` is the mean over prompts of the mean score; `pass<n>` as in `pass_at_k`. A rollout that the
    infrastructure failed is left out and counted; a source without any other has no `pass1`. The same prompt and
    rollout get the same seed every time.
    """
    n = config.n_samples_per_prompt or rollout.n_samples_per_prompt
    tasks = [group_task(prompt, rollout, config) for prompt in prompts]
    in_flight = (rollout.vllm_generate_batch_size or rollout.batch_size) * rollout.n_samples_per_prompt
    limit = asyncio.Semaphore(max(1, in_flight // n))

    async def run(task: GroupTask) -> list[RolloutInfo]:
        async with limit:
            try:
                result, _ = await runners.run_group(task)
            except InfraFailure:
                return []
            return result.rollouts

    results = await asyncio.gather(*(run(task) for task in tasks))
    by_source: dict[str, list[list[RolloutInfo]]] = defaultdict(list)
    for prompt, rollouts in zip(prompts, results, strict=True):
        by_source[prompt.data_source].append(rollouts)
    return {f"eval/{source}/{k}": v for source, groups in by_source.items() for k, v in _score(groups, n).items()}


def _score(groups: Sequence[Sequence[RolloutInfo]], n: int) -> dict[str, Metric]:
    scored = [[r for r in rollouts if not isinstance(r.outcome, InfraFailure)] for rollouts in groups]
    scores = [[r.outcome.score for r in rollouts] for rollouts in scored if rollouts]
    done = [r for rollouts in scored for r in rollouts]
    metrics = {
        "pass1": Metric(sum(pass_at_k(s, 1) for s in scores), len(scores)),
        "response_length": Metric(sum(r.generated_tokens for r in done), len(done)),
        "truncated": Metric(sum(r.truncated for r in done), len(done)),
        "failures": Metric(len(groups) * n - len(done)),
    }
    full = [s for s in scores if len(s) == n]
    if n > 1 and full:
        metrics[f"pass{n}"] = Metric(sum(pass_at_k(s, n) for s in full), len(full))
    return metrics
