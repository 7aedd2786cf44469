"""Which device a rank computes on, and how ranks find each other.

One mesh axis so far, `fsdp`: every rank holds a shard of every parameter and takes its share of the samples. It is the
default process group, so collectives below name no group.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented there
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from molt.config import FsdpConfig
from molt.errors import ConfigError

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


def init_distributed(
    rank: int, world_size: int, master_address: str, master_port: int, device: torch.device, timeout_s: float = 1800.0
) -> DeviceMesh:
    """Join the default process group (gloo on a CPU, NCCL on GPUs) and return its 1-D `fsdp` mesh.

    Every rank calls it once; it returns when all have. A single rank needs no address and opens no port.
    Raises `torch.distributed.DistError` when the others do not come within `timeout_s`, which also bounds
    every later collective.
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
        store=_store(rank, world_size, master_address, master_port, timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return init_device_mesh(device.type, (world_size,), mesh_dim_names=("fsdp",))


def _store(rank: int, world_size: int, master_address: str, master_port: int, timeout: timedelta) -> Store:
    """Where ranks exchange their addresses; rank 0 holds it, a single rank needs no port for it."""
    if world_size == 1:
        return HashStore()
    return TCPStore(master_address, master_port, world_size, is_master=rank == 0, timeout=timeout)


def saving_group() -> dist.ProcessGroup:
    """A gloo group of all ranks, for the metadata of checkpoints alone. Every rank calls it once.

    A background save has collectives too; on training's group they meet those of a step and hang.
    """
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


def all_reduce_sums(values: Tensor) -> Tensor:
    """Element-wise sum of `values` over all ranks, in place; the same bits on every rank."""
    # Collective on the default group: every rank, with the same shape and dtype.
    dist.all_reduce(values)
    return values


def local_shard(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, sharing its memory."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor. A sharded one is gathered over `fsdp`: every rank calls it, in the same order."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor
