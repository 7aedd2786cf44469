"""AdamW and the learning rate: one formula for every shape.

    lr(s) = lr * min(1, (s + 1) / warmup_steps) * (min_lr_ratio + (1 - min_lr_ratio) * shape(p))
    p = (s + 1 - warmup_steps) / (total_steps - warmup_steps), clamped to [0, 1]

So the first step has a rate above 0, step `warmup_steps - 1` has the peak, and the last step has `min_lr_ratio` of it
(except for `constant`, and for `inverse_sqrt`, which does not depend on the end).
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from molt.config import OptimizerConfig

DECAY_FRACTION = 0.2
"""wsd: the last fifth of the steps decays (10-20 % in MiniCPM, arXiv 2404.06395)."""


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _polynomial(progress: float) -> float:
    return (1.0 - progress) ** 2


def _warmup_stable_decay(progress: float) -> float:
    return min(1.0, (1.0 - progress) / DECAY_FRACTION)


SHAPES: dict[str, Callable[[float], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "polynomial": _polynomial,
    "wsd": _warmup_stable_decay,
}
"""By `lr_scheduler`: progress after warm-up, in [0, 1], to a factor in [0, 1]."""


def lr_factor(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """The factor of the peak rate in optimizer step `step` (from 0). In (0, 1]."""
    warmup_steps = max(1, round(config.lr_warmup_ratio * total_steps))
    if config.lr_scheduler == "inverse_sqrt":
        shape = min(1.0, math.sqrt(warmup_steps / (step + 1)))
    else:
        progress = (step + 1 - warmup_steps) / max(1, total_steps - warmup_steps)
        progress = min(1.0, max(0.0, progress))
        shape = SHAPES[config.lr_scheduler](progress)
    warmup = min(1.0, (step + 1) / warmup_steps)
    return warmup * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """Fused AdamW over the trainable parameters; vectors (norms, biases) are not decayed.

    Its state exists from the start, so that a checkpoint has the same entries before and after the first step.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim > 1]
    vectors = [parameter for parameter in trainable if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.adam.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=config.adam.lr, betas=config.adam.betas, eps=config.adam.eps, fused=True)
    for parameter in trainable:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def build_scheduler(optimizer: torch.optim.Optimizer, config: OptimizerConfig, total_steps: int) -> LambdaLR:
    """The rate of every optimizer step; step it once after each."""
    return LambdaLR(optimizer, partial(lr_factor, config=config, total_steps=total_steps))


def place(scheduler: LambdaLR, step: int) -> None:
    """Put the schedule where it is after `step` steps, at the rates of the present settings."""
    scheduler.last_epoch = step
    groups = scheduler.optimizer.param_groups
    for group, base_lr, factor_at in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = base_lr * factor_at(step)
