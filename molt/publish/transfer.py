"""The trainer's side of a weight sync: hand named tensors to vLLM's weight-transfer API.

Every policy rank calls `send` (gathering is a collective); the mesh's writer alone talks to the engines through an
`EngineClient`. Shared memory on a CPU; NCCL across GPUs and CUDA IPC between processes on one GPU through vLLM's
trainer engines (written against their API in 0.32, not run here: no GPU).
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from molt.errors import PublicationError
from molt.parallel.mesh import Mesh
from molt.publish.proof import checksum

if TYPE_CHECKING:  # vLLM is imported where it is used
    from vllm.distributed.weight_transfer.base import TrainerInitInfo

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Source = Callable[[], NamedTensors]
"""A fresh pass over the named full tensors, in the same order on every rank."""
SHARED_MEMORY = Path("/dev/shm")


class EngineClient(Protocol):
    """vLLM's `VLLMWeightSyncClient`: each call reaches every engine and returns when all have answered."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: Any) -> None:
        """update_info: a dict, or vLLM's type for one."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class WeightSender(Protocol):
    """Sends the weights; returns the checksum of each tensor as sent (empty except on the writer)."""

    def send(self) -> dict[str, int]: ...


@dataclass
class ShmSender:
    """One safetensors file in shared memory, mapped by every engine on the node."""

    client: EngineClient
    source: Source
    is_writer: bool

    def __post_init__(self):
        if self.is_writer:
            self.client.init_weight_transfer_engine({})

    def send(self) -> dict[str, int]:
        """Gather while the engines still generate; they pause only after that."""
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self.source():  # every rank iterates: the gather is a collective
            if self.is_writer:
                tensors[name] = tensor.contiguous()
        if not self.is_writer:
            return {}

        checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
        folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        # The name has the process id, by which the guard removes what a killed rank leaves.
        with tempfile.TemporaryDirectory(prefix=f"molt-weights-{os.getpid()}-", dir=folder) as aside:
            path = f"{aside}/weights.safetensors"
            self._write(tensors, path)
            self.client.start_weight_update()
            self.client.update_weights({"path": path})
            self.client.finish_weight_update()
        return checksums

    def _write(self, tensors: dict[str, torch.Tensor], path: str) -> None:
        try:
            save_file(tensors, path)
        except (OSError, SafetensorError) as error:
            size = sum(tensor.nbytes for tensor in tensors.values())
            raise PublicationError(
                f"{path}: {size:,} bytes of weights do not fit ({error}), so the engines would keep the old policy and "
                "the run stops. Free shared memory, or give the container more of it (docker --shm-size)."
            ) from error


class VllmSender:
    """NCCL or CUDA IPC through vLLM's trainer engine. Not run here: no GPU."""

    def __init__(self, backend: str, client: EngineClient, source: Source, mesh: Mesh, engine_workers: int):
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self.is_writer = mesh.is_writer
        self.source = _recording_source(source)
        self.engine = WeightTransferTrainerFactory.trainer_init(
            _init_info(backend, mesh.rank, engine_workers),
            client=client,
            source=self.source,
        )

    def send(self) -> dict[str, int]:
        self.source.checksums.clear()
        self.engine.send_weights()
        if not self.is_writer:
            return {}
        return dict(self.source.checksums)


def _init_info(backend: str, rank: int, engine_workers: int) -> "TrainerInitInfo":
    """What vLLM's trainer engine of a back end needs to meet the engines."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    from vllm.utils.network_utils import get_ip, get_open_port

    if backend == "ipc":
        return IPCTrainerInitInfo(rank=rank)
    return NCCLTrainerInitInfo(get_ip(), get_open_port(), world_size=engine_workers + 1, rank=rank)


def _recording_source(source: Source):
    """vLLM's `WeightSource` over `source`, remembering the checksum of what passed."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class RecordingSource(WeightSource):
        def __init__(self):
            self.checksums: dict[str, int] = {}
            self._metadata: list[ParamMeta] | None = None

        def metadata(self) -> list[ParamMeta]:
            if self._metadata is None:  # one more gather, once
                self._metadata = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source()]
            return self._metadata

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in source():
                self.checksums[name] = checksum(tensor)
                yield name, tensor

    return RecordingSource()


def build_sender(
    backend: str, *, client: EngineClient, source: Source, mesh: Mesh, engine_workers: int
) -> WeightSender:
    """The sender of a back end (`shm`, `nccl`, `ipc`); every policy rank builds one."""
    if backend == "shm":
        return ShmSender(client, source, mesh.is_writer)
    return VllmSender(backend, client, source, mesh, engine_workers)
