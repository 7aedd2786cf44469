"""Builds AutoModel's classes on a machine without GPU.

AutoModel 0.7.0 builds some of its models with tables on `cuda:{torch.cuda.current_device()}`, which raises where
there is no GPU, and compiles the activation of its experts. Nothing else of what molt uses of it needs a GPU.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def _first_device() -> int:
    return 0


def build_on_host(build: Callable[[], Model]) -> Model:
    """The model that `build` returns, with its tables on the host and nothing compiled in this process."""
    torch.compiler.set_stance("force_eager")  # the first step would wait 10 s for a C++ compiler, for no gain
    current_device = torch.cuda.current_device
    torch.cuda.current_device = _first_device
    try:
        causal_lm = build()
    finally:
        torch.cuda.current_device = current_device

    for module in causal_lm.modules():
        _move_table_to_host(module)
    return causal_lm


def _move_table_to_host(module: Any) -> None:
    # Where a rotary embedding will make its table at the first forward; a device alone allocates nothing.
    if getattr(module, "device", None) == torch.device("cuda", 0):
        module.device = torch.device("cpu")
