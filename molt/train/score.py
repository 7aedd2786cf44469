"""What a model says of the tokens of a training batch, without learning from them: old, reference, values."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from molt.batch.collate import Batch, collate, gather, scatter
from molt.batch.plan import RankPlan, SampleTask, Scores
from molt.train.step import dummy_batch
from molt.types import Sample

Samples = dict[int, list[list[Sample]]]
"""The arrays of a batch, `samples[group][rollout][segment]`; of a rank, the groups that its plan points to."""


def tasks_of(plan: RankPlan) -> Iterator[SampleTask]:
    return (task for step in plan for micro_batch in step for task in micro_batch)


def sample_of(samples: Samples, task: SampleTask) -> Sample:
    group, rollout, segment = task.at
    return samples[group][rollout][segment]


def lay_out(tasks: list[SampleTask], samples: Samples, *, packed: bool) -> tuple[Batch, Tensor]:
    """The tokens of a micro-batch and its mask, bool `[B, T]`."""
    chosen = [sample_of(samples, task) for task in tasks]
    batch = collate([sample.token_ids for sample in chosen], packed=packed)
    return batch, scatter(batch, [sample.mask for sample in chosen])


def logprobs_of(model: nn.Module, temperature: float) -> Callable[[Batch, Tensor | None], Tensor]:
    """What `score` calls to get log-probs at a temperature."""
    return lambda batch, mask: model(batch, temperature=temperature, needed=mask)[0]


@torch.no_grad()
def score(
    forward: Callable[[Batch, Tensor | None], Tensor], plan: RankPlan, samples: Samples, *, packed: bool
) -> Scores:
    """`forward(batch, mask)`, float `[B, T]`, of every micro-batch of a rank, as one array per sample.

    Every rank calls it with a plan of the same shape: FSDP gathers parameters in each forward.
    """
    found: Scores = {}
    for tasks in (micro_batch for step in plan for micro_batch in step):
        batch, mask = lay_out(tasks, samples, packed=packed) if tasks else (dummy_batch(), None)
        values = forward(batch, mask).float().cpu()
        if tasks:
            of_samples = (array.numpy().astype(np.float32) for array in gather(batch, values))
            found |= dict(zip((task.at for task in tasks), of_samples, strict=True))
    return found
