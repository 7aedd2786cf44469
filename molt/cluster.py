"""Ray, resources and placement: starting engines, policy ranks and runners, and knowing they are up.

Every actor asks Ray for 0 CPUs: on a small machine a request for one each would wait silently for ever.
What is scarce are GPUs, and those are counted here.
"""

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from molt import guard
from molt.agents.load import resolved
from molt.algo.plugin import absolute, load_estimator
from molt.batch.plan import RankPlan
from molt.config import RLConfig
from molt.errors import ConfigError, LostError, ResourceError
from molt.parallel.mesh import DTYPES, param_dtype, resolve_device
from molt.report.metrics import merge
from molt.rollout.engine_worker import EngineSettings, RolloutEngineWorker
from molt.rollout.pool import DEAD, EngineGroup
from molt.rollout.runner_pool import GRACE_S, RunnerPool
from molt.rollout.runner_worker import RunnerSettings, RunnerWorker, longest_s
from molt.train.critic import Critic, CriticSettings
from molt.train.policy import Policy, PolicySettings
from molt.train.policy_worker import CriticWorker, PolicyRanks, PolicyWorker, ReferenceWorker
from molt.train.rank_worker import Ranks, TokenArrayRefs
from molt.train.reference import Reference, ReferenceSettings
from molt.types import Metric

START_TIMEOUT_S = 1800.0
"""For loading models; a 1T model from network storage takes its time."""
CALL_TIMEOUT_S = 3600.0
"""For one publication, or one training batch, beyond the running requests it waits for."""

PLACED = {"num_cpus": 0, "memory": 1}
"""Options of an actor without a GPU. One byte: Ray heeds no strategy for an actor that asks for nothing."""
SPREAD = PLACED | {"scheduling_strategy": "SPREAD"}
"""Over all nodes in turn: agents want CPUs and sandboxes, and the loss of one node should not take all there is."""

THIRD_PARTY_ENV = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
}
DETERMINISTIC_ENV = {"VLLM_BATCH_INVARIANT": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What deterministic kernels on GPUs need. Not run here: no GPU."""
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
    reference: Ranks | None
    """None unless a KL to a frozen model is computed."""
    critic: Ranks | None
    """None unless the estimator needs values."""
    runners: RunnerPool

    async def infer(self, plans: Callable[..., list[RankPlan]], groups: list[ray.ObjectRef]) -> TokenArrayRefs:
        """What reference and critic say of a training batch; `plans(ranks=...)` splits it."""
        models = {"ref_logprobs": self.reference, "values": self.critic}
        present = {name: ranks for name, ranks in models.items() if ranks}
        found = await asyncio.gather(*(r.infer(plans(ranks=len(r.workers)), groups) for r in present.values()))
        return dict(zip(present, found, strict=True))

    async def train(self, returns: list[ray.ObjectRef], *, freeze_policy: bool) -> dict[str, Metric]:
        """The optimizer steps of the prepared batch, policy and critic side by side."""
        steps = [] if freeze_policy else [self.policy.train()]
        return merge(await asyncio.gather(*steps, *([self.critic.train(returns)] if self.critic else [])))

    @property
    def trained(self) -> list[Ranks]:
        """What a checkpoint holds."""
        return [ranks for ranks in (self.policy, self.critic) if ranks]

    @property
    def _groups(self) -> list[Ranks]:
        return [ranks for ranks in (self.policy, self.reference, self.critic) if ranks]

    async def restart_ranks(self) -> None:
        """All ranks of all models anew, with the weights they first had."""
        async with _starting():
            await asyncio.gather(*(ranks.restart() for ranks in self._groups))

    def end(self) -> None:
        """Kill every process. In a Ray session that outlives the run they would live as long as anything names them."""
        for actor in [*self.engines.engines, *self.runners.runners, *(w for r in self._groups for w in r.workers)]:
            ray.kill(actor)

    async def evidence(self) -> dict[str, list[Any]]:
        """By model, what its breaker skipped since the last call."""
        return {ranks.name: await ranks.evidence() for ranks in self.trained}

    async def save(self, tmp: Path, background: bool) -> None:
        await asyncio.gather(*(ranks.save(tmp, background) for ranks in self.trained))

    async def written(self, tmp: Path) -> None:
        await asyncio.gather(*(ranks.written(tmp) for ranks in self.trained))

    async def load(self, path: Path) -> None:
        await asyncio.gather(*(ranks.load(path) for ranks in self.trained))


def start_ray(config: RLConfig) -> None:
    """Join the Ray cluster of this machine (`ray start`), or start a local one that ends with this driver."""
    device = resolve_device(config.fsdp.device)
    gpu_env = DETERMINISTIC_ENV if config.train.full_determinism_enable else {}
    variables = THIRD_PARTY_ENV | (CPU_ENV if device.type == "cpu" else gpu_env)
    used = [config.actor.model_name_or_path, config.ref.model_name_or_path, config.critic.model_name_or_path]
    if all(Path(model).exists() for model in used if model):
        variables["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    guard.start(os.getpid())
    every_worker = {"env_vars": variables, "worker_process_setup_hook": "molt.rare_gc.collect_rarely"}
    ray.init(include_dashboard=False, configure_logging=False, log_to_driver=True, runtime_env=every_worker)


def num_engines(config: RLConfig) -> int:
    """0 where the rollouts are replayed."""
    return 0 if config.train.rollout_replay_dir else config.vllm.num_engines


def model_ranks(config: RLConfig, gpus: int) -> dict[str, int]:
    """Ranks of each model of a run on `gpus` GPUs (0: a CPU): of the policy, and of what its advantages need.

    Policy ranks that are not set are what the others leave free, none with `eval_only`. Colocated models have the
    policy's. Raises `ResourceError` with the sum when more is asked for than there is.
    """
    engines = num_engines(config) * config.vllm.tensor_parallel_size
    if config.eval.eval_only:
        return {"policy": 0}
    asked = {"reference": config.ref} if config.algo.reads_reference_model else {}
    if "values" in load_estimator(config.algo.advantage.estimator).needs:
        asked["critic"] = config.critic
    together = config.train.colocate_fsdp_models
    others = {name: model.num_nodes * (model.num_gpus_per_node or 1) for name, model in asked.items()}
    apart, actor = 0 if together else sum(others.values()), config.actor
    if gpus == 0 or actor.num_gpus_per_node:
        policy = actor.num_nodes * (actor.num_gpus_per_node or 1)
    else:
        policy = max(1, gpus - engines - apart)
    if gpus and policy + apart + engines > gpus:
        table = "".join(f" + {ranks} {name} ranks" for name, ranks in others.items() if not together)
        raise ResourceError(
            f"GPUs asked for: {policy} policy ranks (actor.num_nodes x actor.num_gpus_per_node){table} + {engines} for "
            f"engines (vllm.num_engines x vllm.tensor_parallel_size) = {policy + apart + engines}; present: {gpus}. "
            "Ray would wait for ever. Lower one of them, or pass --train.colocate_fsdp_models."
        )
    return {"policy": policy} | (dict.fromkeys(others, policy) if together else others)


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
        partial_rollouts=config.train.partial_rollout_enable,
        deterministic=config.train.full_determinism_enable,
    )


def runner_settings(config: RLConfig) -> RunnerSettings:
    agent_path = resolved(config.train.agent_path)
    return RunnerSettings(agent_path, config.actor.model_name_or_path, config.data, config.rollout, config.train.seed)


def model_settings(config: RLConfig, total_steps: int) -> dict[str, tuple[Callable[..., Any], Any]]:
    """By model, its class and what its ranks need to know. total_steps: training batches of the whole run."""
    steps = math.ceil(config.rollouts_per_batch / config.rollouts_per_step)  # of one pass over one batch
    actor, fsdp, algo, max_len = config.actor, config.fsdp, config.algo, config.data.max_len
    advantage = replace(algo.advantage, estimator=absolute(algo.advantage.estimator))
    policy = PolicySettings(
        actor=actor,
        fsdp=fsdp,
        algo=replace(algo, advantage=advantage, loss=algo.loss and absolute(algo.loss)),
        train=config.train,
        temperature=config.rollout.temperature,
        max_len=max_len,
        total_steps=(total_steps - actor.freezing_steps) * steps * config.train.max_epochs,
        engine_dtype=engine_dtype(config),
    )
    path = actor.model_name_or_path
    reference = ReferenceSettings(config.ref.model_name_or_path or path, fsdp, config.rollout.temperature, max_len)
    critic = replace(config.critic, model_name_or_path=config.critic.model_name_or_path or path)
    values = CriticSettings(critic, fsdp, config.train, max_len, total_steps * steps * critic.max_epochs)
    return {"policy": (Policy, policy), "reference": (Reference, reference), "critic": (Critic, values)}


@asynccontextmanager
async def started(
    config: RLConfig, total_steps: int, engine_worker: Any = RolloutEngineWorker
) -> AsyncIterator[Cluster]:
    """All processes, started side by side, every one with its model loaded; they end with the block.

    total_steps: training batches of the whole run. engine_worker: the Ray actor class of an `Engine`; the tests have
    one without vLLM. Raises `ResourceError` when they are not up within `START_TIMEOUT_S`.
    """
    device = resolve_device(config.fsdp.device)
    gpus = 0 if device.type == "cpu" else int(ray.cluster_resources().get("GPU", 0))
    tensor_parallel, train = config.vllm.tensor_parallel_size, config.train
    engine = engine_settings(config)
    # Where GPUs are free says where an engine goes.
    place = {"num_cpus": 0, "num_gpus": tensor_parallel} if gpus else SPREAD
    engine_actor = engine_worker.options(max_restarts=-1, **place)
    engines = [engine_actor.remote(engine) for _ in range(num_engines(config))]
    runner = runner_settings(config)
    runners = RunnerPool(
        lambda name: RunnerWorker.options(**SPREAD).remote(runner, engines, name),
        (config.rollout.num_runners or (2 if gpus else 1)) if engines else 0,
        deadline_s=longest_s(config.rollout) + GRACE_S,
        attempts=config.rollout.max_retries + 1,
        silence_s=train.watchdog_s,
        max_restarts=train.max_restarts,
    )
    # Without partial rollouts a publication lets running requests finish; the driver waits a little longer than the
    # rank, which knows more.
    engine_s = CALL_TIMEOUT_S + config.rollout.timeout_s
    group = EngineGroup(
        engines,
        timeout_s=engine_s,
        silence_s=train.watchdog_s,
        start_timeout_s=START_TIMEOUT_S,
        max_restarts=train.max_restarts,
    )
    models = _place(model_ranks(config, gpus), gpus, together=train.colocate_fsdp_models, timeout_s=engine_s + GRACE_S)
    models["policy"].meeting(engines, engine.weight_transfer, tensor_parallel, engine_s)
    settings = model_settings(config, total_steps)
    processes = Cluster(group, models["policy"], models.get("reference"), models.get("critic"), runners)
    try:
        async with _starting():
            await asyncio.gather(
                group.start(), *(ranks.start(*settings[name]) for name, ranks in models.items()), runners.ready()
            )
        yield processes
    finally:
        processes.end()


@asynccontextmanager
async def _starting() -> AsyncIterator[None]:
    """Raises `ResourceError` when the block takes too long, `LostError` when a process dies in it."""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            yield
    except TimeoutError:
        raise ResourceError(
            f"the processes were not up within {START_TIMEOUT_S:.0f} s: the run ends here. Look at `ray status` for "
            "resources that are not there, and at the output above for a model that does not load."
        ) from None
    except DEAD as error:
        if getattr(error, "actor_init_failed", False):  # it says itself what its constructor raised
            raise
        raise LostError(
            f"a process died while the run started ({repr(error).strip().splitlines()[-1]}): the run ends here. Free "
            "memory if the system killed it, then start it again."
        ) from error


RANKS = {"policy": (PolicyRanks, PolicyWorker), "reference": (Ranks, ReferenceWorker), "critic": (Ranks, CriticWorker)}


def _place(counts: dict[str, int], gpus: int, *, together: bool, timeout_s: float) -> dict[str, Any]:
    """The ranks of each model, a GPU each; `together`, rank r of every model has a share of GPU r."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    alone = {"num_cpus": 0, "num_gpus": 1} if gpus else PLACED | {"scheduling_strategy": here}
    options: list[dict[str, Any]] = [alone] * max(counts.values())
    if gpus and together:  # not run: there was no machine with GPUs
        bundles = placement_group([{"GPU": 1}] * counts["policy"])
        places = [PlacementGroupSchedulingStrategy(bundles, index) for index in range(counts["policy"])]
        options = [{"num_cpus": 0, "num_gpus": 1 / len(counts), "scheduling_strategy": place} for place in places]
    made = {}
    for name, count in counts.items():
        ranks, worker = RANKS[name]
        made[name] = ranks(partial(_spawn, worker, options), count, name=name, timeout_s=timeout_s)
    return made


def _spawn(worker: Any, options: list[dict[str, Any]], index: int) -> Any:
    return worker.options(**options[index]).remote()
