"""The engine's side of a weight sync: runs inside vLLM's worker process.

`EngineExtension` is mixed into the worker (`worker_extension_cls`); importing this module registers the shared-memory
back end with vLLM before the model loads. Two repairs below are for the CPU build of vLLM 0.32, where a layerwise
reload otherwise leaves stale packed weights behind *silently*.
"""

import os
import select
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from molt.errors import PublicationError
from molt.publish.proof import checksum, combine

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Shared memory needs no rendezvous."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    path: str
    """A safetensors file in shared memory, written by the trainer's first rank."""


@dataclass(frozen=True)
class DroppedKernel:
    """The kernel of a mixture of experts, and the quantization method of vLLM that it was taken from."""

    method: Any
    kernel: Any


class ShmTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Maps the trainer's file and reloads layer by layer."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        self._dropped_kernels: list[DroppedKernel] = []

    def start_weight_update(self) -> None:
        if self.device.type == "cpu":
            self._drop_moe_kernels()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        if not os.path.exists(update_info.path):
            raise PublicationError(
                f"{update_info.path} is not on this engine's machine: on CPUs weights go through shared memory, so the "
                "engines would keep the old policy. Start Ray on one machine, or use GPUs."
            )
        model: Any = self.model  # vLLM's models load themselves; their type is any module
        with safe_open(update_info.path, "pt", device="cpu") as file:
            model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._restore_moe_kernels()
        if self.device.type == "cpu":
            self.repack_tied_head()

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    def _drop_moe_kernels(self) -> None:
        # An expert kernel that exists is not packed again, so reloaded experts would stay unpacked: garbage.
        for module in self.model.modules():
            method: Any = getattr(module, "quant_method", None)
            kernel = getattr(method, "moe_kernel", None)
            if kernel is not None:
                self._dropped_kernels.append(DroppedKernel(method, kernel))
                method.moe_kernel = None

    def _restore_moe_kernels(self) -> None:
        for dropped in self._dropped_kernels:
            if dropped.method.moe_kernel is None:  # a layer this update did not touch
                dropped.method.moe_kernel = dropped.kernel
        self._dropped_kernels.clear()

    def repack_tied_head(self) -> None:
        """Pack the tied head again: it keeps a packed copy of the *old* embedding until then."""
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
                module.quant_method.process_weights_after_loading(module)


WeightTransferEngineFactory.register_engine("shm", ShmTransferEngine)


class EngineExtension:
    """Methods that `collective_rpc` reaches in every vLLM worker; `self` is vLLM's worker."""

    model_runner: Any
    """Of vLLM's worker."""
    _molt_received: dict[str, int]
    """Checksums of the tensors that were loaded since the last receipt."""
    _molt_loading: str
    """The tensor that is being loaded."""

    def molt_watch_owner(self, owner_pid: int) -> None:
        """Exit when `owner_pid` (the actor that started this engine) is gone, even after SIGKILL.

        The engine core outlives a killed parent otherwise and keeps its memory.
        """
        parent = os.getppid()  # the engine core where executor processes exist, else the owner itself
        watch = threading.Thread(target=_exit_with, args=(owner_pid, parent), name="molt-owner-watch", daemon=True)
        watch.start()

    def molt_record_weights(self) -> None:
        """Checksum every tensor on its way into the model, whatever back end carries it."""
        model = self.model_runner.model
        load_weights = model.load_weights
        self._molt_received = {}

        def recorded(weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                self._molt_loading = name
                self._molt_received[name] = checksum(tensor)
                yield name, tensor

        def load_recorded(weights: NamedTensors, *args: Any, **kwargs: Any) -> Any:
            self._molt_loading = "(none)"
            try:
                return load_weights(recorded(weights), *args, **kwargs)
            except Exception as error:  # named here, stopped by the publication
                self._molt_received.clear()
                raise RuntimeError(f"tensor {self._molt_loading!r} could not be loaded: {error!r}") from error

        model.load_weights = load_recorded

    def molt_receipt(self) -> tuple[dict[str, int], int]:
        """Checksums received since the last call, and the digest of what the model holds now."""
        received = self._molt_received
        self._molt_received = {}
        held = {}
        for name, parameter in self.model_runner.model.named_parameters():
            if parameter.numel() > 0:  # packed ones are left empty: the probe vouches for them
                held[name] = checksum(parameter)
        return received, combine(held)


def _exit_with(owner_pid: int, parent_pid: int) -> None:
    """Wait until the owner ends, then end the parent, if it is a process between the two, and this process."""
    try:
        # A pidfd becomes readable when its process ends, so the thread sleeps until then.
        poll = select.poll()
        poll.register(os.pidfd_open(owner_pid), select.POLLIN)
        poll.poll()
    except ProcessLookupError:
        pass  # gone before we looked
    if parent_pid not in (owner_pid, 1) and os.getppid() == parent_pid:
        os.kill(parent_pid, signal.SIGKILL)
    os._exit(1)
