"""Which models a run has, and how many ranks each gets: the settings and the rows of its algorithm together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from molt.algorithm import Algorithm
from molt.config import RLConfig
from molt.errors import ResourceError


@dataclass(frozen=True)
class Role:
    """A model that is trained, or scores tokens: policy, reference or critic."""

    name: str
    model: str
    """Directory or hub name."""
    num_nodes: int
    num_gpus_per_node: int | None
    """None: for the policy what the others leave free, else 1."""


def roles(config: RLConfig, algorithm: Algorithm) -> list[Role]:
    """The policy, and the reference and critic if the algorithm needs them."""
    actor = config.actor
    found = [Role("policy", actor.model_name_or_path, actor.num_nodes, actor.num_gpus_per_node)]
    if algorithm.reads_reference_model:
        ref = config.ref
        model = ref.model_name_or_path or actor.model_name_or_path
        found.append(Role("reference", model, ref.num_nodes, ref.num_gpus_per_node))
    if algorithm.needs_critic:
        critic = config.critic
        model = critic.model_name_or_path or actor.model_name_or_path
        found.append(Role("critic", model, critic.num_nodes, critic.num_gpus_per_node))
    return found


def assign_ranks(roles: Sequence[Role], *, gpus: int, engine_gpus: int, colocated: bool) -> dict[str, int]:
    """Ranks of each role on `gpus` GPUs (0: a CPU), of which the engines take `engine_gpus`.

    Policy ranks that are not set are what the others leave free. colocated: reference and critic share the policy's
    GPUs and have as many ranks. Raises `ResourceError` with the sum when the run needs more than there is.
    """
    policy, *others = roles
    ranks_of_others = {role.name: role.num_nodes * (role.num_gpus_per_node or 1) for role in others}
    gpus_of_others = 0 if colocated else sum(ranks_of_others.values())
    if gpus == 0 or policy.num_gpus_per_node:
        policy_ranks = policy.num_nodes * (policy.num_gpus_per_node or 1)
    else:
        policy_ranks = max(1, gpus - engine_gpus - gpus_of_others)
    if gpus > 0 and policy_ranks + gpus_of_others + engine_gpus > gpus:
        shown = {} if colocated else ranks_of_others
        raise ResourceError(_too_many(policy_ranks, shown, engine_gpus, gpus))
    if colocated:
        ranks_of_others = dict.fromkeys(ranks_of_others, policy_ranks)
    return {policy.name: policy_ranks, **ranks_of_others}


def _too_many(policy_ranks: int, ranks_of_others: Mapping[str, int], engine_gpus: int, gpus: int) -> str:
    terms = [f"{policy_ranks} policy ranks (actor.num_nodes x actor.num_gpus_per_node)"]
    terms += [f"{ranks} {name} ranks" for name, ranks in ranks_of_others.items()]
    terms.append(f"{engine_gpus} for engines (vllm.num_engines x vllm.tensor_parallel_size)")
    total = policy_ranks + sum(ranks_of_others.values()) + engine_gpus
    return (
        f"GPUs asked for: {' + '.join(terms)} = {total}; present: {gpus}. Ray would wait for ever. "
        "Lower one of them, or pass --train.colocate_fsdp_models."
    )
