"""Ray, resources and placement: starting engines, policy ranks and runners, and knowing they are up.

Every actor asks Ray for 0 CPUs: on a small machine a request for one each would wait silently for ever.
What is scarce are GPUs, and those are counted here.
"""

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from molt import guard
from molt.config import RLConfig
from molt.errors import ConfigError, ResourceError
from molt.parallel.mesh import DTYPES, param_dtype, resolve_device
from molt.rollout.engine_worker import EngineSettings, RolloutEngineWorker
from molt.rollout.pool import EngineGroup
from molt.rollout.producer import GRACE_S, RunnerPool
from molt.rollout.runner_worker import RunnerSettings, RunnerWorker
from molt.train.policy import PolicySettings
from molt.train.policy_worker import PolicyRanks, PolicyWorker

START_TIMEOUT_S = 1800.0
"""For loading models; a 1T model from network storage takes its time."""
CALL_TIMEOUT_S = 3600.0
"""For one training batch, or one publication beyond the running requests it waits for."""

THIRD_PARTY_ENV = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
}
CPU_ENV = {
    # One thread per process: two on busy cores are slower. nobind: vLLM would pin every engine to core 0.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
}


@dataclass(frozen=True)
class Cluster:
    """Everything that runs outside the driver."""

    engines: EngineGroup
    policy: PolicyRanks
    """No rank at all with `eval.eval_only`."""
    runners: RunnerPool


def start_ray(config: RLConfig) -> None:
    """Join the Ray cluster of this machine (`ray start`), or start a local one that ends with this driver."""
    device = resolve_device(config.fsdp.device)
    variables = THIRD_PARTY_ENV | (CPU_ENV if device.type == "cpu" else {})
    if Path(config.actor.model_name_or_path).exists():
        variables["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    guard.start(os.getpid())
    ray.init(include_dashboard=False, configure_logging=False, log_to_driver=True, runtime_env={"env_vars": variables})


def policy_ranks(config: RLConfig, gpus: int) -> int:
    """Policy ranks of a run on `gpus` GPUs (0: a CPU); unset means what the engines leave free, `eval_only` none.

    Raises `ResourceError` with the sum when more is asked for than there is.
    """
    actor, engines = config.actor, config.vllm.num_engines * config.vllm.tensor_parallel_size
    if config.eval.eval_only:
        ranks = 0
    elif gpus == 0 or actor.num_gpus_per_node:
        ranks = actor.num_nodes * (actor.num_gpus_per_node or 1)
    else:
        ranks = max(1, gpus - engines)
    if gpus and ranks + engines > gpus:
        raise ResourceError(
            f"GPUs asked for: {ranks} policy ranks (actor.num_nodes x actor.num_gpus_per_node) + {engines} for "
            f"engines (vllm.num_engines x vllm.tensor_parallel_size) = {ranks + engines}; present: {gpus}. Ray "
            "would wait for ever. Lower one of them."
        )
    return ranks


def engine_dtype(config: RLConfig) -> torch.dtype:
    """What the engines hold and the trainer publishes; unset: the trainer's compute dtype."""
    if config.vllm.dtype != "auto":
        return DTYPES[config.vllm.dtype]
    return param_dtype(config.fsdp, resolve_device(config.fsdp.device))


def engine_settings(config: RLConfig) -> EngineSettings:
    device = resolve_device(config.fsdp.device)
    transfer = config.vllm.weight_transfer
    if device.type == "cpu" and transfer in ("nccl", "ipc"):
        raise ConfigError(
            f"vllm.weight_transfer (={transfer}) copies between GPUs, there is none: no weights would arrive. Use auto."
        )
    return EngineSettings(
        model=config.actor.model_name_or_path,
        dtype=str(engine_dtype(config)).removeprefix("torch."),
        max_model_len=config.data.max_len,
        device=device.type,
        vllm=config.vllm,
        weight_transfer=("shm" if device.type == "cpu" else "nccl") if transfer == "auto" else transfer,
    )


def runner_settings(config: RLConfig) -> RunnerSettings:
    agent_path = str(Path(config.train.agent_path).resolve())
    return RunnerSettings(agent_path, config.actor.model_name_or_path, config.data, config.rollout, config.train.seed)


def policy_settings(config: RLConfig, total_optimizer_steps: int) -> PolicySettings:
    return PolicySettings(
        actor=config.actor,
        fsdp=config.fsdp,
        advantage=config.algo.advantage,
        train=config.train,
        temperature=config.rollout.temperature,
        max_len=config.data.max_len,
        total_steps=total_optimizer_steps,
        engine_dtype=engine_dtype(config),
    )


async def start(config: RLConfig, total_optimizer_steps: int, engine_worker: Any = RolloutEngineWorker) -> Cluster:
    """Start all processes side by side; return when every one has loaded its model.

    engine_worker: the Ray actor class of an `Engine`; the tests have one without vLLM.
    Raises `ResourceError` when they are not up within `START_TIMEOUT_S`.
    """
    device = resolve_device(config.fsdp.device)
    gpus = 0 if device.type == "cpu" else int(ray.cluster_resources().get("GPU", 0))
    ranks, tensor_parallel = policy_ranks(config, gpus), config.vllm.tensor_parallel_size
    engine, engine_actor = engine_settings(config), engine_worker.options(num_cpus=0, num_gpus=gpus and tensor_parallel)
    engines = [engine_actor.remote(engine) for _ in range(config.vllm.num_engines)]
    workers = [PolicyWorker.options(num_cpus=0, num_gpus=1 if gpus else 0).remote() for _ in range(ranks)]
    runner = runner_settings(config)
    attempts = config.rollout.max_retries + 1
    runners = RunnerPool(
        lambda name: RunnerWorker.options(num_cpus=0).remote(runner, engines, name),
        config.rollout.num_runners or (2 if gpus else 1),
        deadline_s=attempts * config.rollout.timeout_s + GRACE_S,
        attempts=attempts,
    )
    # A publication lets running requests finish; the driver waits a little longer than the rank, which knows more.
    engine_s = CALL_TIMEOUT_S + config.rollout.timeout_s
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await asyncio.gather(
                *(engine.start.remote() for engine in engines),
                _start_ranks(workers, policy_settings(config, total_optimizer_steps)),
                runners.ready(),
            )
            transfer = (engines, engine.weight_transfer, len(engines) * tensor_parallel, engine_s)
            await asyncio.gather(*(w.connect.remote(*transfer) for w in workers))
    except TimeoutError:
        raise ResourceError(
            f"the processes were not up within {START_TIMEOUT_S:.0f} s: the run ends here. Look at `ray status` for "
            "resources that are not there, and at the output above for a model that does not load."
        ) from None
    return Cluster(
        EngineGroup(engines, timeout_s=engine_s), PolicyRanks(workers, timeout_s=engine_s + GRACE_S), runners
    )


async def _start_ranks(workers: list[Any], settings: PolicySettings) -> None:
    """Every rank joins the process group at the first one's address and loads its shard."""
    if workers:
        address, port = await workers[0].address.remote()
        # Ray shows each actor only its own GPU, so every rank is local rank 0.
        await asyncio.gather(
            *(w.start.remote(settings, rank, len(workers), address, port, 0) for rank, w in enumerate(workers))
        )
