"""The engine's side of a publication: runs inside vLLM's worker process.

`EngineExtension` is mixed into the worker (`worker_extension_cls`); importing this module registers
the shared-memory back end with vLLM before the model loads. Two repairs below are for the CPU build
of vLLM 0.32, where a layerwise reload otherwise leaves stale packed weights behind *silently*.
"""

import os
import select
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from molt.errors import PublicationError
from molt.publish.proof import checksum, combine


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Shared memory needs no rendezvous."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    path: str
    """A safetensors file in shared memory, written by the trainer's first rank."""


class ShmTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Maps the trainer's file and reloads layer by layer."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        self._moe_kernels: list[tuple[object, object]] = []

    def start_weight_update(self) -> None:
        self._drop_moe_kernels()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        if not os.path.exists(update_info.path):
            raise PublicationError(
                f"{update_info.path} is not on this engine's machine: on CPUs weights go through shared memory, so the "
                "engines would keep the old policy. Start Ray on one machine, or use GPUs."
            )
        with safe_open(update_info.path, "pt", device="cpu") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._restore_moe_kernels()
        if self.device.type == "cpu":
            self.repack_tied_head()

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    def _drop_moe_kernels(self) -> None:
        # An expert kernel that exists is not packed again, so reloaded experts would stay unpacked: garbage.
        for module in self.model.modules() if self.device.type == "cpu" else ():
            method = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                self._moe_kernels.append((method, method.moe_kernel))
                method.moe_kernel = None

    def _restore_moe_kernels(self) -> None:
        for method, kernel in self._moe_kernels:
            if method.moe_kernel is None:  # a layer this update did not touch
                method.moe_kernel = kernel
        self._moe_kernels.clear()

    def repack_tied_head(self) -> None:
        # A tied head keeps a packed copy of the *old* embedding until it is processed again.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
                module.quant_method.process_weights_after_loading(module)


WeightTransferEngineFactory.register_engine("shm", ShmTransferEngine)


class EngineExtension:
    """Methods that `collective_rpc` reaches in every vLLM worker; `self` is vLLM's worker."""

    def molt_watch_owner(self, owner_pid: int) -> None:
        """Leave when `owner_pid` (the actor that started this engine) is gone, even after SIGKILL.

        The engine core outlives a killed parent otherwise and keeps its memory. A pidfd becomes
        readable when its process ends, so the thread sleeps until then.
        """
        parent = os.getppid()  # the engine core where executor processes exist, else the owner itself

        def watch():
            try:
                poll = select.poll()
                poll.register(os.pidfd_open(owner_pid), select.POLLIN)
                poll.poll()
            except ProcessLookupError:
                pass  # gone before we looked
            if parent not in (owner_pid, 1) and os.getppid() == parent:
                os.kill(parent, signal.SIGKILL)
            os._exit(1)

        threading.Thread(target=watch, name="molt-owner-watch", daemon=True).start()

    def molt_record_weights(self) -> None:
        """Checksum every tensor on its way into the model, whatever back end carries it."""
        model = self.model_runner.model
        load = model.load_weights
        self._molt_received: dict[str, int] = {}

        def recorded(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                self._molt_loading = name
                self._molt_received[name] = checksum(tensor)
                yield name, tensor

        def load_recorded(weights, *args, **kwargs):
            self._molt_loading = "(none)"
            try:
                return load(recorded(weights), *args, **kwargs)
            except Exception as error:  # named here, stopped by the publication
                self._molt_received.clear()
                raise RuntimeError(f"tensor {self._molt_loading!r} could not be loaded: {error!r}") from error

        model.load_weights = load_recorded

    def molt_receipt(self) -> tuple[dict[str, int], int]:
        """Checksums received since the last call, and the digest of what the model holds now."""
        received, self._molt_received = self._molt_received, {}
        # Packed parameters are left empty: the probe vouches for them.
        held = {name: checksum(p) for name, p in self.model_runner.model.named_parameters() if p.numel()}
        return received, combine(held)
