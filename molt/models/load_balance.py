"""The load balance of a mixture of experts, as a loss of each sequence.

Two things differ from DeepSeek-V3's (arXiv 2412.19437, equations 17 to 20):
1. The load counts the experts that the router chose. The paper counts the K with the largest affinity, without the
   correction bias and the group limit by which some models choose. The load follows from the choice, and the bias is
   not trained.
2. The mean over layers is taken here, so that the coefficient does not depend on the depth.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from molt.batch.collate import Batch
from molt.errors import ConfigError
from molt.models.backends.protocol import ModuleValues, Route, Router

AffinityOf = Callable[[Tensor], Tensor]
"""Float32 router logits `[n, E]` to the affinities of the experts, normalised to sum to 1."""


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def _normalized_sigmoid(logits: Tensor) -> Tensor:
    affinities = logits.sigmoid()
    return affinities / affinities.sum(-1, keepdim=True)


AFFINITIES: dict[str, AffinityOf] = {
    "qwen3_moe": _softmax,
    "deepseek_v3": _normalized_sigmoid,
    "glm4_moe": _normalized_sigmoid,
}
"""By model type: the affinities that the model routes by."""


def refuse_balance(config: PreTrainedConfig, setting: str, routers: int | None = None) -> None:
    """Raise `ConfigError` for a model without experts, or with some whose routers are not known.

    setting: the setting that wants the balance, as "`actor.aux_loss_coef` (=0.001)"; routers: how many the model has;
    None: not counted.
    """
    if config.model_type not in AFFINITIES or routers == 0:
        names = config.architectures or [config.model_type]
        raise ConfigError(
            f"{setting}: {names[0]} has no experts whose load molt can read, so nothing would be balanced. "
            f"Use 0, or a model of type {', '.join(AFFINITIES)}."
        )


@contextmanager
def recorded_routes(routers: Sequence[Router]) -> Iterator[list[Route]]:
    """A list to which every router adds its `Route` during a forward.

    A hook keeps what the layer computes and computes nothing: gradient checkpointing runs the layer again without it.
    """
    routes: list[Route] = []
    handles = [router.module.register_forward_hook(_recorder(router, routes)) for router in routers]
    try:
        yield routes
    finally:
        for handle in handles:
            handle.remove()


def _recorder(router: Router, routes: list[Route]) -> Callable[[nn.Module, ModuleValues, ModuleValues], None]:
    def record_route(module: nn.Module, inputs: ModuleValues, outputs: ModuleValues) -> None:
        routes.append(router.route_of(inputs, outputs))

    return record_route


def balance_loss(routes: Sequence[Route], model_type: str, batch: Batch) -> Tensor:
    """`sum_i f_i P_i` over the E experts, averaged over layers; float32 `[S]`, 1 if balanced, at most E / K.

    Over the T real tokens of a sequence: `f_i = E / (K T) * #{t: i chosen}`, without gradient, and `P_i` the mean of
    the normalised affinities. It depends on the sequence alone, whatever shares its micro-batch or pads its row.
    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2 (see above).
    """
    device = routes[0].logits.device
    real = batch.real.flatten()
    cells = real.nonzero()[:, 0].to(device)
    segments = batch.segments.flatten()[real].to(device)
    lengths = torch.tensor(batch.lengths, device=device)[:, None]

    total = torch.zeros(len(lengths), device=device)
    for route in routes:
        of_real_tokens = Route(logits=route.logits[cells], chosen=route.chosen[cells])
        total = total + _layer_balance(of_real_tokens, AFFINITIES[model_type], segments, lengths)
    return total / len(routes)


def _layer_balance(route: Route, affinities_of: AffinityOf, segments: Tensor, lengths: Tensor) -> Tensor:
    """float32 `[S]` of one layer. segments: int64 `[n]`, the sequence of each real token; lengths: `[S, 1]`."""
    affinities = affinities_of(route.logits.float())
    sequences = len(lengths)
    experts = affinities.shape[-1]
    experts_per_token = route.chosen.shape[-1]

    affinity_sums = affinities.new_zeros(sequences, experts).index_add(0, segments, affinities)
    mean_affinities = affinity_sums / lengths

    # One bin for each pair of a sequence and an expert.
    bins = segments[:, None] * experts + route.chosen
    counts = bins.flatten().bincount(minlength=sequences * experts).view(sequences, experts)
    frequencies = counts * experts / (experts_per_token * lengths)

    return (frequencies * mean_affinities).sum(1)
