"""Ray, resources and placement: starting engines, policy ranks and runners, and knowing they are up.

Every actor asks Ray for 0 CPUs: on a small machine a request for one each would wait silently for ever.
What is scarce are GPUs, and those are counted here.
"""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from molt import guard
from molt.batch.plan import RankPlan
from molt.config import RLConfig
from molt.errors import LostError, ResourceError
from molt.parallel.mesh import resolve_device
from molt.parallel.shape import MeshShape
from molt.process import loopback_without_proxy, safe_path, short_sockets
from molt.report.metrics import merge
from molt.roles import assign_ranks
from molt.rollout.agent_host import longest_s
from molt.rollout.engine_group import EngineGroup
from molt.rollout.engine_worker import RolloutEngineWorker
from molt.rollout.handles import DEAD, EngineHandle, KeeperHandle, RunnerHandle
from molt.rollout.keeper_worker import KeeperSettings, KeeperWorker
from molt.rollout.keepers import Keepers
from molt.rollout.runner_pool import GRACE_S, RunnerPool
from molt.rollout.runner_worker import RunnerWorker
from molt.spec import ProcessSpec
from molt.train.breaker import Evidence
from molt.train.critic import Critic
from molt.train.exchange import NOWHERE, routes
from molt.train.policy import Policy
from molt.train.policy_worker import (
    CriticRanks,
    CriticWorker,
    EngineLink,
    PolicyRanks,
    PolicyWorker,
    ReferenceWorker,
)
from molt.train.rank_worker import ArrayRefs, Ranks
from molt.train.reference import Reference
from molt.types import Lineage, Metric, OnEvent
from molt.worker_settings import critic_settings, engine_settings, policy_settings, reference_settings, runner_settings

ActorClass = Any
"""A class that `ray.remote` made; Ray gives it no type."""
RanksT = TypeVar("RanksT", bound=Ranks)
ActorOptions = dict[str, Any]
"""The options of an actor: resources and where it goes."""
Plans = dict[str, list[RankPlan]]
"""Of a training batch, by model: a plan for each of its data-parallel ranks."""

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
    "TORCH_CPP_LOG_LEVEL": "ERROR",
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
    """The processes of a run besides its driver."""

    engines: EngineGroup
    policy: PolicyRanks
    """Without any rank in an evaluation."""
    reference: Ranks | None
    """None unless a KL to a frozen model is computed."""
    critic: CriticRanks | None
    """None unless the estimator needs values."""
    runners: RunnerPool
    keepers: Keepers

    def plans(self, split: Callable[..., list[RankPlan]], *, aggregation: str) -> Plans:
        """The plans of a training batch for every model. `split(ranks=...)`: `plan_batch` of that batch.

        aggregation: of the policy's loss; the critic's is the mean over tokens.
        """
        plans: Plans = {}
        for ranks in self._models:
            plans[ranks.name] = split(ranks=ranks.shape.data_ranks)
        plans[self.policy.name] = split(ranks=self.policy.shape.data_ranks, aggregation=aggregation)
        return plans

    async def fetch(self, plans: Plans, groups: list[ray.ObjectRef]) -> list[int]:
        """Every rank gets the samples of its plan. The indices of groups whose arrays are lost, for which none did."""
        lost = await asyncio.gather(*(ranks.fetch(plans[ranks.name], groups) for ranks in self._models))
        return sorted(set().union(*lost))

    async def infer(self, plans: Plans) -> dict[str, ArrayRefs]:
        """Log-probs of the reference and values of the critic for the batch that was fetched, by who reads them."""
        models: dict[str, Ranks] = {}
        if self.reference is not None:
            models["ref_logprobs"] = self.reference
        if self.critic is not None:
            models["values"] = self.critic
        calls = []
        for ranks in models.values():
            of_model = plans[ranks.name]
            calls.append(ranks.infer(of_model, routes(of_model, plans[self.policy.name])))
        found = await asyncio.gather(*calls)
        return dict(zip(models, found, strict=True))

    async def prepare(
        self, plans: Plans, inferred: dict[str, ArrayRefs], batches_trained: int, kl_coef: float, lineage: Lineage
    ) -> tuple[dict[str, Metric], ArrayRefs]:
        """As `PolicyRanks.prepare`, with the returns for the ranks of the critic, if there is one."""
        of_policy = plans[self.policy.name]
        to_critic = [NOWHERE] * len(of_policy)
        if self.critic is not None:
            to_critic = routes(of_policy, plans[self.critic.name])
        return await self.policy.prepare(of_policy, inferred, to_critic, batches_trained, kl_coef, lineage)

    async def train(self, returns: ArrayRefs, *, freeze_policy: bool) -> dict[str, Metric]:
        """The optimizer steps of the prepared batch, policy and critic side by side."""
        steps = []
        if not freeze_policy:
            steps.append(self.policy.train())
        if self.critic is not None:
            steps.append(self.critic.train(returns))
        return merge(await asyncio.gather(*steps))

    async def restart_ranks(self) -> None:
        """Replace all ranks of all models; they have the weights they first had."""
        async with _starting():
            await asyncio.gather(*(ranks.restart() for ranks in self._models))

    async def evidence(self) -> dict[str, list[Evidence]]:
        """By model, the steps that its breaker skipped since the last call."""
        return {ranks.name: await ranks.evidence() for ranks in self._trained}

    async def save(self, tmp: Path, background: bool) -> None:
        """Every trained model's part of a checkpoint."""
        await asyncio.gather(*(ranks.save(tmp, background) for ranks in self._trained))

    async def written(self, tmp: Path) -> None:
        """Wait until the parts that `save` began are on disk."""
        await asyncio.gather(*(ranks.written(tmp) for ranks in self._trained))

    async def load(self, path: Path) -> None:
        """Every trained model's part of a checkpoint, into the ranks."""
        await asyncio.gather(*(ranks.load(path) for ranks in self._trained))

    def end(self) -> None:
        """Kill every process. In a Ray session that outlives the run they would live as long as anything names them."""
        actors: list[Any] = [*self.engines.engines, *self.runners.runners, *self.keepers.handles]
        for ranks in self._models:
            actors.extend(ranks.workers)
        for actor in actors:
            ray.kill(actor)

    @property
    def _trained(self) -> list[Ranks]:
        """The models that a checkpoint holds."""
        return [ranks for ranks in (self.policy, self.critic) if ranks is not None]

    @property
    def _models(self) -> list[Ranks]:
        return [ranks for ranks in (self.policy, self.reference, self.critic) if ranks is not None]


def start_ray(config: RLConfig) -> None:
    """Join the Ray cluster of this machine (`ray start`), or start a local one that ends with this driver."""
    variables = THIRD_PARTY_ENV | loopback_without_proxy(os.environ) | safe_path(os.environ)
    if resolve_device(config.fsdp.device).type == "cpu":
        variables |= CPU_ENV
    elif config.train.full_determinism_enable:
        variables |= DETERMINISTIC_ENV
    if _all_models_are_local(config):
        variables["HF_HUB_OFFLINE"] = "1"
    sockets = short_sockets(os.environ)
    os.environ.update(sockets)
    variables |= sockets
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # no colour codes in a file
    logging.getLogger("ray").setLevel(logging.ERROR)
    guard.start(os.getpid())
    every_worker = {"env_vars": variables, "worker_process_setup_hook": "molt.process.prepare"}
    ray.init(include_dashboard=False, configure_logging=False, log_to_driver=True, runtime_env=every_worker)


def _all_models_are_local(config: RLConfig) -> bool:
    models = [config.actor.model_name_or_path, config.ref.model_name_or_path, config.critic.model_name_or_path]
    return all(Path(model).exists() for model in models if model)


@asynccontextmanager
async def started(
    spec: ProcessSpec, on_event: OnEvent, engine_worker: ActorClass = RolloutEngineWorker
) -> AsyncIterator[Cluster]:
    """All processes, started side by side, every one with its model loaded; they end with the block.

    on_event: takes what happens to engines and runners. engine_worker: the Ray actor class of an `Engine`; the tests
    have one without vLLM. Raises `ResourceError` when the processes are not up within `START_TIMEOUT_S`.
    """
    gpus = 0
    if spec.device.type != "cpu":
        gpus = int(ray.cluster_resources().get("GPU", 0))
    engines = _spawn_engines(spec, gpus, engine_worker)
    placement = _place_ranks(spec, gpus)
    processes = Cluster(
        engines=_engine_group(spec, engines, on_event),
        runners=_runner_pool(spec, gpus, engines, on_event),
        keepers=_keepers(spec, on_event),
        policy=_policy_ranks(spec, placement, engines),
        reference=placement.ranks("reference", Ranks, ReferenceWorker),
        critic=placement.ranks("critic", CriticRanks, CriticWorker),
    )
    try:
        async with _starting():
            await asyncio.gather(
                processes.engines.start(),
                _start_models(spec, processes),
                processes.runners.ready(),
                _prepare_keepers(spec, processes),
            )
        yield processes
    finally:
        processes.end()


def _spawn_engines(spec: ProcessSpec, gpus: int, engine_worker: ActorClass) -> list[EngineHandle]:
    options = SPREAD
    if gpus:  # where GPUs are free decides where an engine goes
        options = {"num_cpus": 0, "num_gpus": spec.config.vllm.tensor_parallel_size}
    actor = engine_worker.options(max_restarts=-1, **options)
    settings = engine_settings(spec)
    return [actor.remote(settings) for _ in range(spec.num_engines)]


def _engine_group(spec: ProcessSpec, engines: list[EngineHandle], on_event: OnEvent) -> EngineGroup:
    train = spec.config.train
    return EngineGroup(
        engines,
        timeout_s=train.watchdog_s,
        silence_s=train.watchdog_s,
        start_timeout_s=START_TIMEOUT_S,
        max_restarts=train.max_restarts,
        on_event=on_event,
    )


def _runner_pool(spec: ProcessSpec, gpus: int, engines: list[EngineHandle], on_event: OnEvent) -> RunnerPool:
    config = spec.config
    settings = runner_settings(config)
    count = config.rollout.num_runners or (2 if gpus else 1)
    if not engines:  # a replay
        count = 0

    actor: ActorClass = RunnerWorker

    def spawn(name: str) -> RunnerHandle:
        return actor.options(**SPREAD).remote(settings, engines, name)

    return RunnerPool(
        spawn,
        count,
        deadline_s=longest_s(config.rollout, settings.reward) + GRACE_S,
        attempts=config.rollout.max_retries + 1,
        calls=1 if settings.reward.scorer is None else 2,
        silence_s=config.train.watchdog_s,
        max_restarts=config.train.max_restarts,
        on_event=on_event,
    )


def _keepers(spec: ProcessSpec, on_event: OnEvent) -> Keepers:
    """A keeper on every node that there is now; an evaluation keeps nothing."""
    config = spec.config
    settings = KeeperSettings(config.actor.model_name_or_path, config.data.chat_template)
    nodes: list[str] = []
    if spec.roles:
        here = ray.get_runtime_context().get_node_id()
        others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
        nodes = [here, *sorted(others)]
    replicate = config.rollout.replicate
    if replicate is None:
        replicate = len(nodes) > 1

    actor: ActorClass = KeeperWorker

    def spawn(node: str) -> KeeperHandle:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        return actor.options(**PLACED, scheduling_strategy=there).remote(settings)

    return Keepers(
        spawn,
        nodes,
        replicate=replicate,
        max_restarts=config.train.max_restarts,
        on_event=on_event,
    )


def _publication_s(spec: ProcessSpec) -> float:
    """Without partial rollouts a weight sync lets running requests finish."""
    return CALL_TIMEOUT_S + spec.config.rollout.timeout_s


@dataclass(frozen=True)
class _RankPlacement:
    """Where the ranks of every model run."""

    counts: dict[str, int]
    """Ranks by role."""
    options: list[ActorOptions]
    """Ray's options for rank 0, 1, ... of any model."""
    timeout_s: float
    """For one call on all ranks of a model."""

    def ranks(self, role: str, kind: type[RanksT], worker: ActorClass) -> RanksT | None:
        """The ranks of a role, or None if the run does not have it."""
        if role not in self.counts:
            return None
        spawn = partial(_spawn, worker, self.options)
        return kind(spawn, self.shape(role), name=role, timeout_s=self.timeout_s)

    def shape(self, role: str) -> MeshShape:
        """The axes of a model's ranks: all of them hold different shards."""
        return MeshShape(dp_shard=self.counts[role])


def _place_ranks(spec: ProcessSpec, gpus: int) -> _RankPlacement:
    config = spec.config
    colocated = config.train.colocate_fsdp_models
    counts = {"policy": 0}  # an evaluation
    if spec.roles:
        engine_gpus = spec.num_engines * config.vllm.tensor_parallel_size
        counts = assign_ranks(spec.roles, gpus=gpus, engine_gpus=engine_gpus, colocated=colocated)
    return _RankPlacement(
        counts=counts,
        options=_rank_options(counts, gpus, colocated=colocated),
        # A rank knows more about a weight sync that fails than the driver does, so the driver waits a little longer.
        timeout_s=_publication_s(spec) + GRACE_S,
    )


def _policy_ranks(spec: ProcessSpec, placement: _RankPlacement, engines: list[EngineHandle]) -> PolicyRanks:
    policy = PolicyRanks(
        partial(_spawn, PolicyWorker, placement.options),
        placement.shape("policy"),
        name="policy",
        timeout_s=placement.timeout_s,
    )
    config = spec.config
    link = EngineLink(
        engines=list(engines),
        backend=spec.weight_transfer,
        workers_per_engine=config.vllm.tensor_parallel_size,
        timeout_s=config.train.watchdog_s,
        drain_s=0.0 if config.train.partial_rollout_enable else config.rollout.timeout_s,
    )
    policy.meeting(link)
    return policy


async def _start_models(spec: ProcessSpec, processes: Cluster) -> None:
    """Load every model of the run, side by side."""
    starts = []
    for role in spec.roles:
        if role.name == "policy":
            starts.append(processes.policy.start(Policy, policy_settings(spec)))
        elif role.name == "reference" and processes.reference is not None:
            starts.append(processes.reference.start(Reference, reference_settings(spec, role)))
        elif processes.critic is not None:
            starts.append(processes.critic.start(Critic, critic_settings(spec, role)))
    await asyncio.gather(*starts)


async def _prepare_keepers(spec: ProcessSpec, processes: Cluster) -> None:
    """What they need for the stored rollouts, if there will be any."""
    if spec.config.logger.rollouts_per_step != 0:
        await processes.keepers.load_tokenizer()


def _rank_options(counts: dict[str, int], gpus: int, *, colocated: bool) -> list[ActorOptions]:
    """Ray's options for rank 0, 1, ... of any model: a GPU each, or a share of the policy's GPU if `colocated`."""
    most = max(counts.values())
    if gpus == 0:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        return [PLACED | {"scheduling_strategy": here}] * most
    if not colocated:
        return [{"num_cpus": 0, "num_gpus": 1}] * most
    # Not run: there was no machine with GPUs.
    bundles = placement_group([{"GPU": 1}] * counts["policy"])
    options = []
    for index in range(counts["policy"]):
        place = PlacementGroupSchedulingStrategy(bundles, index)
        options.append({"num_cpus": 0, "num_gpus": 1 / len(counts), "scheduling_strategy": place})
    return options


def _spawn(worker: ActorClass, options: Sequence[ActorOptions], rank: int) -> ActorHandle:
    return worker.options(**options[rank]).remote()


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
        if getattr(error, "actor_init_failed", False):  # the message is that of its constructor
            raise
        raise LostError(
            f"a process died while the run started ({repr(error).strip().splitlines()[-1]}): the run ends here. Free "
            "memory if the system killed it, then start it again."
        ) from error
