"""Real ranks for tests: processes that meet over gloo, and the gradients they end with."""

import multiprocessing
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from molt.algo.reduce import token_weights
from molt.batch.collate import collate, scatter
from molt.batch.partition import micro_batches, partition
from molt.config import AdamConfig, FsdpConfig, ModelConfig, OptimizerConfig
from molt.models.build import build_policy
from molt.parallel.mesh import Mesh, init_distributed
from molt.parallel.shape import MeshShape
from molt.train.checkpoint import export_hf
from molt.train.optimizer import build_optimizer, build_scheduler
from molt.train.sft import SftMicroBatch, negative_log_likelihood
from molt.train.step import accumulate, optimizer_step

CPU = torch.device("cpu")
# A fork server imports torch and transformers once for all tests.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.train.ranks"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def alone() -> Mesh:
    """A process group of this process; the one that it was in ends."""
    return meet(0, MeshShape(), 0)


def meet(rank: int, shape: MeshShape, port: int) -> Mesh:
    """The mesh of this process as `rank`; the process group that it was in ends."""
    if dist.is_initialized():
        dist.destroy_process_group()
    return init_distributed(rank, shape, "127.0.0.1", port, CPU, timeout_s=50)


def run_ranks(function: Callable, world_size: int, directory: Path, *args: Any, limit_s: float = 60) -> list[Any]:
    """`function(mesh, *args)` in `world_size` processes; what each returned."""
    port = free_port()
    directory.mkdir(parents=True, exist_ok=True)
    ranks = [
        CONTEXT.Process(target=_rank, args=(rank, world_size, port, directory, function, args))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(limit_s)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * world_size, f"ranks ended with {codes}; their tracebacks are above"
    return [torch.load(directory / f"result_{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank(rank: int, world_size: int, port: int, directory: Path, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    mesh = meet(rank, MeshShape(dp_shard=world_size), port)
    torch.save(function(mesh, *args), directory / f"result_{rank}.pt")
    dist.destroy_process_group()


def trainer(path: Path, mesh, lr: float = 1e-2, gradient_checkpoint: str = "full", backend: str = "auto", **settings):
    """Model, optimizer and scheduler of one rank, ready to step."""
    config = OptimizerConfig(adam=AdamConfig(lr=lr, weight_decay=0.01), lr_scheduler="cosine", **settings)
    model = build_policy(
        ModelConfig(str(path), gradient_checkpoint), FsdpConfig(device="cpu", backend=backend), mesh, CPU
    )
    optimizer = build_optimizer(model, config)
    return model, optimizer, build_scheduler(optimizer, config, total_steps=20)


def step_batch(seed: int = 0, lengths=(37, 5, 20, 11, 2, 9, 30)):
    """Token ids and loss masks of a few sequences; not every one of them is trained."""
    rng = np.random.default_rng(seed)
    token_ids = [rng.integers(3, 99, length).astype(np.int32) for length in lengths]
    masks = [rng.random(length) < 0.6 for length in lengths]
    for mask in masks:
        mask[0] = False
    masks[1][:] = False
    return token_ids, masks


def micro_batches_of(
    mesh, batch, size: int | None, packed: bool, tokens: int | None = None
) -> list[SftMicroBatch | None]:
    """This data-parallel rank's micro-batches of `size` sequences or so many tokens, weighted over all ranks."""
    token_ids, masks = batch
    weights = token_weights([int(mask.sum()) for mask in masks])
    lengths = [len(ids) for ids in token_ids]
    shares = partition(lengths, mesh.data_ranks)
    made: list[SftMicroBatch | None] = []
    for chosen in micro_batches(shares, lengths, size=size, max_tokens=tokens, packed=packed)[mesh.data_rank]:
        if not chosen:
            made.append(None)
            continue
        laid_out = collate([token_ids[i] for i in chosen], packed=packed)
        mask = scatter(laid_out, [masks[i] for i in chosen])
        of_tokens = scatter(laid_out, [np.float32(weights[i]) * masks[i] for i in chosen])
        made.append(SftMicroBatch(laid_out, mask, of_tokens))
    return made


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def gradients(mesh, path: Path, layouts) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """For each layout, (size, packed) or (None, packed, tokens): how many real micro-batches this rank had, and the
    gradient of all ranks."""
    model, optimizer, _ = trainer(path, mesh)
    results = []
    for layout in layouts:
        mine = micro_batches_of(mesh, step_batch(), *layout)
        accumulate(model, optimizer, mine, negative_log_likelihood)
        real = sum(m is not None for m in mine)
        results.append((real, {name: whole(p.grad) for name, p in model.named_parameters()}))
    return results


def steps(mesh, path: Path, layouts, number: int = 3) -> list[list[dict[str, float]]]:
    """Metrics of `number` optimizer steps from the same weights, for each layout."""
    results = []
    for layout in layouts:
        model, optimizer, scheduler = trainer(path, mesh)
        metrics = []
        for seed in range(number):
            mine = micro_batches_of(mesh, step_batch(seed), *layout)
            done = optimizer_step(model, optimizer, scheduler, mine, negative_log_likelihood, mesh=mesh, max_norm=1.0)
            metrics.append({name: done[name].total for name in ("train/loss", "train/grad_norm", "train/lr")})
        results.append(metrics)
    return results


class BackendRun(NamedTuple):
    """What `backends` saw of one model: `probe` are log-probs and entropies [T] of a sequence after the steps."""

    module: str
    dtypes: set[torch.dtype]
    steps: list[list[tuple[float, float]]]
    probe: list[torch.Tensor]
    automodel_imported: bool


def backends(mesh, cases, layouts, target: Path) -> dict[tuple[str, str], BackendRun]:
    """For each (model directory, back end): (loss, gradient norm) of two steps in each layout, then an export."""
    from tests.tiny import char_tokenizer

    results = {}
    for path, backend in cases:
        steps = []
        for layout in layouts:
            model, optimizer, scheduler = trainer(path, mesh, backend=backend)
            steps.append([])
            for seed in range(2):
                mine = micro_batches_of(mesh, step_batch(seed), *layout)
                done = optimizer_step(
                    model, optimizer, scheduler, mine, negative_log_likelihood, mesh=mesh, max_norm=1.0
                )
                steps[-1].append((done["train/loss"].total, done["train/grad_norm"].total))
        with torch.no_grad():
            output = model(collate(step_batch(seed=5)[0][:1], packed=False))
            probe = [output.logprobs[0], output.entropy[0]]
        export_hf(model, char_tokenizer(), target / f"{path.name}_{backend}_{mesh.size}", mesh)
        module, dtypes = type(model.causal_lm).__module__, {p.dtype for p in model.parameters()}
        results[path.name, backend] = BackendRun(module, dtypes, steps, probe, "nemo_automodel" in sys.modules)
    return results
