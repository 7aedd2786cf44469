"""AdamW and the learning rate: one formula for every shape.

    lr(s) = lr * min(1, (s + 1) / warmup_steps) * (min_lr_ratio + (1 - min_lr_ratio) * shape(p))
    p = (s + 1 - warmup_steps) / (total_steps - warmup_steps), clamped to [0, 1]

So the first step has a rate above 0, step `warmup_steps - 1` has the peak, and the last step has
`min_lr_ratio` of it (`constant`, and `inverse_sqrt`, which ends where it ends, aside).
"""

import math

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from molt.config import OptimizerConfig

DECAY_FRACTION = 0.2
"""wsd: the last fifth of the steps decays (10-20 % in MiniCPM, arXiv 2404.06395)."""

SHAPES = {
    "constant": lambda p: 1.0,
    "linear": lambda p: 1.0 - p,
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
    "polynomial": lambda p: (1.0 - p) ** 2,
    "wsd": lambda p: min(1.0, (1.0 - p) / DECAY_FRACTION),
}


def lr_factor(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """What the peak rate is multiplied by in optimizer step `step` (from 0). In (0, 1]."""
    warmup_steps = max(1, round(config.lr_warmup_ratio * total_steps))
    if config.lr_scheduler == "inverse_sqrt":
        shape = min(1.0, math.sqrt(warmup_steps / (step + 1)))
    else:
        progress = (step + 1 - warmup_steps) / max(1, total_steps - warmup_steps)
        shape = SHAPES[config.lr_scheduler](min(1.0, max(0.0, progress)))
    return min(1.0, (step + 1) / warmup_steps) * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """Fused AdamW over the trainable parameters; vectors (norms, biases) are not decayed.

    Its state exists from the start, so that a checkpoint has the same entries before and after the first step.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": config.adam.weight_decay},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=config.adam.lr, betas=config.adam.betas, eps=config.adam.eps, fused=True)
    for p in params:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


def build_scheduler(optimizer: torch.optim.Optimizer, config: OptimizerConfig, total_steps: int) -> LambdaLR:
    """The rate of every optimizer step; step it once after each."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, config, total_steps))


def place(scheduler: LambdaLR, step: int) -> None:
    """Put the schedule where it is after `step` steps, at the rates of the present settings."""
    scheduler.last_epoch = step
    for group, base, factor in zip(
        scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor(step)
