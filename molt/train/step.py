"""The optimizer step: one accumulation loop for policy, critic and SFT.

The loss of a micro-batch is already `sum(weight * loss_t)` with weights of the whole step batch, over all data-parallel
ranks. So gradients are added, over micro-batches and over the mesh's axes, and nothing divides. A number of which
several ranks have copies counts `1 / copies` on each of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from molt.batch.collate import Batch, collate
from molt.errors import TrainingError
from molt.parallel.mesh import Mesh, local_shard
from molt.parallel.shape import ALL_AXES
from molt.report.metrics import merge
from molt.types import Metric

MicroBatchT = TypeVar("MicroBatchT")
LossFn = Callable[[nn.Module, MicroBatchT], tuple[Tensor, dict[str, Metric]]]
"""(model, micro-batch) to the scalar `sum(weight * loss_t)` and this rank's metrics."""


class StepRefusedError(TrainingError):
    """A step that was not taken: weights and optimizer are as they were, and no gradient is left.

    metrics: this rank's, and `train/loss`, `train/grad_norm`, `train/lr` of all; a value may be NaN.
    tensors: the parameters whose gradient on this rank is not finite.
    """

    def __init__(self, message: str, metrics: Mapping[str, Metric] | None = None, tensors: Sequence[str] = ()):
        super().__init__(message)
        self.metrics = metrics or {}
        self.tensors = list(tensors)


def optimizer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    micro_batches: Iterable[MicroBatchT | None],
    loss_fn: LossFn[MicroBatchT],
    *,
    mesh: Mesh,
    max_norm: float,
    spike: float = inf,
) -> dict[str, Metric]:
    """Accumulate, clip, step. Every rank calls it with the same number of micro-batches, and peers with the same ones.

    micro_batches: None stands for one that this rank does not have; a dummy of weight 0 runs in its place.
    max_norm: the gradient of all ranks is scaled down to this norm; <= 0 disables it.
    spike: a step whose norm (before clipping) is above it is refused.
    Returns this rank's metrics, and `train/loss`, `train/grad_norm` (before clipping) and `train/lr` of all.
    Raises, on every rank, `StepRefusedError` when loss or gradient are not finite, or the gradient is a spike, and
    `TrainingError` when a step with a rate above 0 and a gradient above 0 moved no master weight.
    """
    loss_of_rank, metrics = accumulate(model, optimizer, micro_batches, loss_fn)
    params = [p for p in model.parameters() if p.requires_grad]
    loss, norm = _loss_and_norm(loss_of_rank, params, mesh)
    lr = max(group["lr"] for group in optimizer.param_groups)
    metrics |= {
        "train/loss": Metric(loss),
        "train/grad_norm": Metric(norm),
        "train/lr": Metric(lr),
    }
    if not np.isfinite(loss + norm) or norm > spike:
        tensors = _non_finite(model)
        optimizer.zero_grad()
        raise _refusal(loss, norm, metrics, tensors)

    if 0 < max_norm < norm:
        for param in params:
            if param.grad is not None:
                local_shard(param.grad).mul_(max_norm / norm)

    before = _fingerprint(params)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    moved_on_rank = (before != _fingerprint(params)).any()
    # Collective over all axes: every rank. A shard may stay where it is while another one moves.
    moved = mesh.sum(moved_on_rank.double(), *ALL_AXES).item()
    if lr > 0 and norm > 0 and not moved:
        raise TrainingError(
            f"a step with learning rate {lr:g} and gradient norm {norm:g} moved no master weight: training would go "
            "on for ever without effect. The rate is below the resolution of float32 weights: raise `adam.lr`."
        )
    return metrics


def _loss_and_norm(loss: Tensor, params: Sequence[Tensor], mesh: Mesh) -> tuple[float, float]:
    """The loss and the gradient norm of all ranks. loss: scalar of this rank, which its peers have too."""
    sums = torch.stack([loss.double() / mesh.shape.peers, _square_of_gradients(params, mesh)])
    # Collective over all axes: every rank. One sum for both, so that all ranks refuse the same steps.
    total_loss, total_square = mesh.sum(sums, *ALL_AXES).tolist()
    return total_loss, total_square**0.5


def _square_of_gradients(params: Sequence[Tensor], mesh: Mesh) -> Tensor:
    """float64: this rank's part of the squared norm of all gradients.

    Different shards are disjoint, so their squares add up; each of several copies counts `1 / copies` of it.
    """
    grads_by_copies: dict[int, list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            grads_by_copies.setdefault(mesh.copies(param), []).append(local_shard(param.grad))

    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for copies, grads in grads_by_copies.items():
        square = torch.nn.utils.get_total_norm(grads).double() ** 2
        total += square / copies
    return total


def _refusal(loss: float, norm: float, metrics: dict[str, Metric], tensors: list[str]) -> StepRefusedError:
    evidence = ""
    if tensors:
        shown = tensors[:3]
        evidence = f"Not finite on this rank: the gradients of {shown} and {len(tensors) - len(shown)} more."
    return StepRefusedError(
        f"loss {loss:g}, gradient norm {norm:g}: the step was not taken, since it would have destroyed the "
        f"weights. {evidence} Lower the learning rate, or look at the samples of this step.",
        metrics,
        tensors,
    )


def accumulate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[MicroBatchT | None],
    loss_fn: LossFn[MicroBatchT],
) -> tuple[Tensor, dict[str, Metric]]:
    """Forward and backward of every micro-batch; gradients end in `.grad`, summed over ranks.

    micro_batches: at least one. Returns the loss of this rank's micro-batches (scalar, detached) and their merged
    metrics.
    """
    optimizer.zero_grad()
    losses: list[Tensor] = []
    metrics: dict[str, Metric] = {}
    for micro_batch in micro_batches:
        if micro_batch is None:
            loss = _dummy_loss(model)
        else:
            loss, of_micro_batch = loss_fn(model, micro_batch)
            metrics = merge([metrics, of_micro_batch])
        # FSDP's reduce-scatter runs in every backward, so all ranks must get here equally often. Postponing it
        # to the last one would keep an unsharded float32 gradient of the whole model on every rank.
        loss.backward()
        losses.append(loss.detach())

    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total, metrics


def dummy_batch() -> Batch:
    """What a rank runs when it has no micro-batch left but the others do."""
    return collate([np.zeros(2, dtype=np.int64)], packed=False)


def _dummy_loss(model: nn.Module) -> Tensor:
    """0, with a gradient of 0 to every parameter."""
    output = model(dummy_batch())
    if isinstance(output, tuple):  # log-probs and entropies
        output = output[0]
    return 0.0 * output.sum()


def _fingerprint(params: Sequence[Tensor]) -> Tensor:
    """int64 `[len(params)]`: the sum of the bit patterns of this rank's shard of each float32 master."""
    sums = []
    for param in params:
        bits = local_shard(param.detach()).view(torch.int32)
        sums.append(bits.sum())
    return torch.stack(sums)


def _non_finite(model: nn.Module) -> list[str]:
    """Parameters whose gradient is not finite on this rank."""
    names = []
    for name, param in model.named_parameters():
        if param.grad is not None and not local_shard(param.grad).isfinite().all():
            names.append(name)
    return names
