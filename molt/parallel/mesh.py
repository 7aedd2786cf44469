"""Which device a rank computes on, how ranks find each other, and every collective that molt calls itself.

`Mesh` is a rank among the others. Its collectives name the axes that they run over (`shape.py`); what FSDP and
torch.distributed.checkpoint call runs over groups that it gave them.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented there
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from molt.config import FsdpConfig
from molt.errors import ConfigError
from molt.parallel.shape import ALL_AXES, DATA_AXES, EXPERT_AXES, Axis, MeshShape

SavingGroup = dist.ProcessGroup
"""The process group of the checkpoints of one model."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def device_count() -> int:
    """GPUs that this process sees."""
    return torch.cuda.device_count()


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of a rank for `fsdp.device`. `local_rank` counts the ranks that see the same GPUs.

    Raises `ConfigError` when the setting needs a GPU and none is visible.
    """
    gpus = device_count()
    if name == "cpu" or (name == "auto" and gpus == 0):
        return torch.device("cpu")
    if local_rank >= gpus:
        raise ConfigError(
            f"`fsdp.device` (={name}): local rank {local_rank} has no GPU, {gpus} are visible. "
            "Start fewer ranks per node, or use --fsdp.device cpu."
        )
    return torch.device("cuda", local_rank)


def param_dtype(config: FsdpConfig, device: torch.device) -> torch.dtype:
    """The compute dtype: `fsdp.param_dtype` if it is set, else bf16, on a CPU float32 (bf16 is emulated there)."""
    if config.param_dtype:
        return DTYPES[config.param_dtype]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16


def single_threaded_on_cpu(device: torch.device) -> None:
    """One thread per process: engines, runners and ranks share the cores, and two threads on busy ones collapse."""
    if device.type == "cpu":
        torch.set_num_threads(1)


def seed(value: int, *, deterministic: bool) -> None:
    """Seed everything random in this process. deterministic: only kernels that give equal bits for equal inputs."""
    torch.manual_seed(value)
    torch.use_deterministic_algorithms(deterministic)


class Mesh:
    """One rank among those of a model, by named axes. Owns their process groups.

    An axis of a single rank has no group, and a collective over such axes alone is nothing: one process pays for none.
    """

    def __init__(self, shape: MeshShape, device: torch.device):
        """Every rank of the default process group makes one, at the same point: groups are made together."""
        assert shape.world_size == dist.get_world_size(), "the shape says where each rank is"
        self.shape = shape
        self.device = device
        """Where this rank computes, and where NCCL adds up."""
        self.rank = dist.get_rank()
        self._of_all = _device_mesh(shape, ALL_AXES, device)
        self._of_experts = _device_mesh(shape, EXPERT_AXES, device) if shape.ep > 1 else None
        self._data_group = self._make_data_group()

    def _make_data_group(self) -> dist.ProcessGroup | None:
        """The ranks with this one's place among peers; None where another group has just these ranks."""
        shape = self.shape
        if min(shape.dp_replicate, shape.dp_shard, shape.peers) == 1:
            return None
        groups = []
        for place in range(shape.peers):
            groups.append(list(range(place, shape.world_size, shape.peers)))
        group, _ = dist.new_subgroups_by_enumeration(groups)
        assert isinstance(group, dist.ProcessGroup), "every rank is in one of them"
        return group

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.shape.world_size

    @property
    def data_ranks(self) -> int:
        """Data-parallel ranks, each with samples of its own."""
        return self.shape.data_ranks

    @property
    def data_rank(self) -> int:
        """The data-parallel rank that this one belongs to."""
        return self.shape.data_rank(self.rank)

    @property
    def is_writer(self) -> bool:
        """Whether this is the one rank that writes files, talks to engines and counts what all ranks did together."""
        return self.rank == 0

    @property
    def is_first_peer(self) -> bool:
        """Whether this rank writes what its peers have in common."""
        return self.shape.is_first_peer(self.rank)

    @property
    def fsdp(self) -> DeviceMesh:
        """What FSDP shards over: `dp_shard`; with several copies of the shards `(dp_replicate, dp_shard)`."""
        if self.shape.dp_replicate > 1:
            return self.device_mesh("dp_replicate", "dp_shard")
        return self.device_mesh("dp_shard")

    def device_mesh(self, *axes: Axis) -> DeviceMesh:
        """The sub-mesh of the given axes, outermost first, for what places tensors. Axes of one rank are not in it."""
        whole = self._of_all
        if self._of_experts is not None and ("ep" in axes or "ep_shard" in axes):
            whole = self._of_experts
        return whole[axes]

    def sum(self, values: Tensor, *axes: Axis) -> Tensor:
        """Element-wise sum of `values` over the axes, in place; the same bits on every rank along them.

        Collective: every rank calls it, with the same shape and dtype. Values that several ranks hold count once if
        each of them gives `1 / copies` of them.
        """
        group = self._group(axes)
        if group is not None:
            dist.all_reduce(values, group=group)
        return values

    def barrier(self, *axes: Axis) -> None:
        """Return when every rank along the axes has called it. Collective: every rank calls it."""
        group = self._group(axes)
        if group is not None:
            dist.barrier(group)

    def saving_group(self) -> SavingGroup:
        """A new gloo group of all ranks, for the metadata of checkpoints alone. Every rank calls it once per model.

        A background save has collectives too; on training's groups they meet those of a step and hang.
        """
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup), "every rank is a member"
        return group

    def copies(self, tensor: Tensor) -> int:
        """How many ranks hold the same part of a parameter: all / (sizes of the axes that shard it)."""
        parts = 1
        if isinstance(tensor, DTensor):
            for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
                if not placement.is_replicate():
                    parts *= size
        return self.size // parts

    def close(self) -> None:
        """Leave all process groups. Every rank calls it last."""
        dist.destroy_process_group()

    def _group(self, axes: Sequence[Axis]) -> dist.ProcessGroup | None:
        """The ranks that differ from this one along these axes alone; None if there is no other."""
        several: list[Axis] = [axis for axis in axes if self.shape.size(axis) > 1]
        if not several:
            return None
        if self.shape.size(*several) == self.size:
            return dist.group.WORLD
        if len(several) == 1:
            return self.device_mesh(*several).get_group()
        assert set(several) == set(DATA_AXES), f"no group for {several}: make one where `_data_group` is made"
        return self._data_group


def _device_mesh(shape: MeshShape, axes: Sequence[Axis], device: torch.device) -> DeviceMesh:
    """The axes with several ranks, and `dp_shard`, of which FSDP needs a mesh for a single rank too."""
    kept: list[Axis] = [axis for axis in axes if shape.size(axis) > 1 or axis == "dp_shard"]
    sizes = tuple(shape.size(axis) for axis in kept)
    return init_device_mesh(device.type, sizes, mesh_dim_names=tuple(kept))


def init_distributed(
    rank: int, shape: MeshShape, master_address: str, master_port: int, device: torch.device, timeout_s: float = 1800.0
) -> Mesh:
    """Join the default process group (gloo on a CPU, NCCL on GPUs) and return this rank's mesh.

    Every rank calls it once; it returns when all have. A single rank needs no address and opens no port.
    Raises `torch.distributed.DistError` when the others do not come within `timeout_s`, which also bounds
    every later collective over all ranks; over a part of them torch's 30 minutes do.
    """
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # gloo beside NCCL: barriers and checkpoint metadata are host objects.
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"

    dist.init_process_group(
        backend,
        store=_store(rank, shape.world_size, master_address, master_port, timeout),
        rank=rank,
        world_size=shape.world_size,
        timeout=timeout,
    )
    return Mesh(shape, device)


def _store(rank: int, world_size: int, master_address: str, master_port: int, timeout: timedelta) -> Store:
    """Where ranks exchange their addresses; rank 0 holds it, a single rank needs no port for it."""
    if world_size == 1:
        return HashStore()
    return TCPStore(master_address, master_port, world_size, is_master=rank == 0, timeout=timeout)


def local_shard(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, sharing its memory."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor. A sharded one is gathered over the axes that shard it: every rank calls it, in one order."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor
