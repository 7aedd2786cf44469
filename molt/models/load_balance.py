"""The load balance of a mixture of experts, as a loss of each sequence.

Two things differ from DeepSeek-V3's (arXiv 2412.19437, equations 17 to 20):
1. Counted are the experts that the router chose; the paper counts the K best scores, without the correction bias
   and the group limit by which some models choose. The load is what the choice makes it, and the bias is not trained.
2. The mean over layers is taken here, so that the coefficient does not depend on the depth.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from molt.batch.collate import Batch
from molt.errors import ConfigError

Route = tuple[Tensor, Tensor]
"""Of one layer: router logits [cells, E] and the experts chosen, int64 [cells, K]."""


def _sigmoid(logits: Tensor) -> Tensor:
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "qwen3_moe": lambda logits: logits.softmax(-1),
    "deepseek_v3": _sigmoid,
    "glm4_moe": _sigmoid,
}
"""By model type: float32 router logits [n, E] to the scores it routes by, normalised to sum to 1."""

OF_AUTOMODEL = "_GateRoutingCore"
ROUTERS = ("Qwen3MoeTopKRouter", "DeepseekV3TopkRouter", "Glm4MoeTopkRouter", OF_AUTOMODEL)
"""Classes that choose experts. AutoModel's is called with logits and returns (weights, chosen, scores), those of
transformers return (logits, weights, chosen)."""


def refuse_balance(config: PreTrainedConfig, setting: str, routers: int | None = None) -> None:
    """Raise `ConfigError` for a model without experts, or with some whose routers are not known.

    setting: what asked for it, as "`actor.aux_loss_coef` (=0.001)"; routers: how many were found, None: not looked.
    """
    if config.model_type not in SCORES or routers == 0:
        raise ConfigError(
            f"{setting}: {(config.architectures or [config.model_type])[0]} has no experts whose load molt can read, "
            f"so nothing would be balanced. Use 0, or a model of type {', '.join(SCORES)}."
        )


@contextmanager
def routes(causal_lm: nn.Module) -> Iterator[list[Route]]:
    """A list to which every router adds its `Route` during a forward. Raises `ConfigError` as `refuse_balance`.

    A hook keeps what the layer computes and computes nothing: gradient checkpointing runs the layer again without it.
    """
    found: list[Route] = []
    routers = [module for module in causal_lm.modules() if type(module).__name__ in ROUTERS]
    refuse_balance(causal_lm.config, "`balance` (=True)", len(routers))

    def keep(router: nn.Module, args: tuple, output: tuple) -> None:
        native = type(router).__name__ == OF_AUTOMODEL
        found.append((args[0], output[1]) if native else (output[0], output[2]))

    handles = [router.register_forward_hook(keep) for router in routers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def balance_loss(found: Sequence[Route], model_type: str, batch: Batch) -> Tensor:
    """`sum_i f_i P_i` over the E experts, averaged over layers; float32 [S], 1 where all is balanced, at most E / K.

    Over the T real tokens of a sequence: `f_i = E / (K T) * #{t: i chosen}`, without gradient, and `P_i` the mean of
    the normalised scores. It is a number of the sequence alone, whatever shares its micro-batch or pads its row.
    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2 (see above).
    """
    device, real = found[0][0].device, batch.real.flatten()
    segments, cells = batch.segments.flatten()[real].to(device), real.nonzero()[:, 0].to(device)
    lengths = torch.tensor(batch.lengths, device=device)[:, None]
    total = torch.zeros(len(lengths), device=device)
    for logits, chosen in found:
        size = len(lengths), logits.shape[-1]
        scores = SCORES[model_type](logits[cells].float())
        mean = scores.new_zeros(size).index_add(0, segments, scores) / lengths
        counts = (segments[:, None] * size[1] + chosen[cells]).flatten().bincount(minlength=size[0] * size[1])
        frequency = counts.view(size) * size[1] / (chosen.shape[-1] * lengths)
        total = total + (frequency * mean).sum(1)
    return total / len(found)
