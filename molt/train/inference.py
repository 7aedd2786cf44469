"""A forward without gradient over a training batch: old log-probs, reference log-probs, values."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from molt.batch.collate import Batch, collate, gather, scatter
from molt.batch.plan import Place, RankPlan, SampleTask
from molt.columns import Column
from molt.models.forward import PolicyModel, ValueModel
from molt.train.step import dummy_batch
from molt.types import Sample

Samples = dict[int, list[list[Sample]]]
"""The arrays of a batch, `samples[group][rollout][segment]`; of a rank, the groups that its plan points to."""
TokenArrays = dict[Place, np.ndarray]
"""One float32 `[T]` per sample: log-probs, or values, of its tokens."""


class Forward(Protocol):
    """One forward of a model."""

    def __call__(self, batch: Batch, needed: Tensor | None) -> Tensor:
        """Log-probs or values, float `[B, T]`. needed: bool `[B, T]`, the only tokens that are read; None: all."""
        ...


def tasks_of(plan: RankPlan) -> Iterator[SampleTask]:
    """Every sample of a plan, in the order of its micro-batches."""
    for step in plan:
        for micro_batch in step:
            yield from micro_batch


def sample_of(samples: Samples, task: SampleTask) -> Sample:
    """The arrays of a planned sample."""
    group, rollout, segment = task.at
    return samples[group][rollout][segment]


def lay_out(tasks: list[SampleTask], samples: Samples, *, packed: bool) -> tuple[Batch, Tensor]:
    """The tokens of a micro-batch and its mask, bool `[B, T]`."""
    chosen = [sample_of(samples, task) for task in tasks]
    batch = collate([sample.token_ids for sample in chosen], packed=packed)
    mask = scatter(batch, [sample.mask for sample in chosen])
    return batch, mask


def lay_out_columns(batch: Batch, tasks: list[SampleTask], samples: Samples) -> dict[str, Tensor]:
    """The columns besides those that every stream has, by name: `[B, T, *shape]`, `fill` in padding."""
    chosen = [sample_of(samples, task).columns for task in tasks]
    further: dict[str, Column] = {}
    for columns in chosen:
        further.update({column.name: column for column in columns.further})

    tensors = {}
    for name, column in further.items():
        arrays = [columns.values(column) for columns in chosen]
        tensors[name] = scatter(batch, arrays, fill=column.fill)
    return tensors


def logprobs_forward(model: PolicyModel, temperature: float) -> Forward:
    """The forward that gives log-probs at a temperature."""

    def forward(batch: Batch, needed: Tensor | None) -> Tensor:
        return model(batch, temperature=temperature, needed=needed).logprobs

    return forward


def values_forward(model: ValueModel) -> Forward:
    """The forward that gives values."""

    def forward(batch: Batch, needed: Tensor | None) -> Tensor:
        return model(batch, needed=needed)

    return forward


@torch.no_grad()
def infer(forward: Forward, plan: RankPlan, samples: Samples, *, packed: bool) -> TokenArrays:
    """Run `forward` over every micro-batch of a rank; one array per sample.

    Every rank calls it with a plan of the same shape: FSDP gathers parameters in each forward.
    """
    arrays: TokenArrays = {}
    for step in plan:
        for tasks in step:
            if tasks:
                arrays |= _infer_micro_batch(forward, tasks, samples, packed=packed)
            else:
                forward(dummy_batch(), None)
    return arrays


def _infer_micro_batch(forward: Forward, tasks: list[SampleTask], samples: Samples, *, packed: bool) -> TokenArrays:
    batch, mask = lay_out(tasks, samples, packed=packed)
    outputs = forward(batch, mask).float().cpu()

    arrays: TokenArrays = {}
    for task, of_sample in zip(tasks, gather(batch, outputs), strict=True):
        arrays[task.at] = of_sample.numpy().astype(np.float32)
    return arrays
