"""Builds AutoModel's classes on a machine without GPU.

AutoModel 0.7.0 builds some of its models with tables on `cuda:{torch.cuda.current_device()}`, which raises where
there is no GPU, and compiles the activation of its experts. Nothing else of what molt uses of it needs a GPU.
"""

from collections.abc import Callable

import torch
from torch import nn


def build_on_host(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that `build` returns, with its tables on the host and nothing compiled in this process."""
    torch.compiler.set_stance("force_eager")  # the first step would wait 10 s for a C++ compiler, for no gain
    asked, torch.cuda.current_device = torch.cuda.current_device, lambda: 0
    try:
        model = build()
    finally:
        torch.cuda.current_device = asked
    for module in model.modules():
        # Where the rotary embedding will make its table at the first forward; a device alone allocates nothing.
        if getattr(module, "device", None) == torch.device("cuda", 0):
            module.device = torch.device("cpu")
    return model
