"""A model's configuration with small sizes: the same class, the same layers in the same order, thin.

No table of families: sizes are told by the names that configurations give them. What a class cannot be built with is
found by building it, so `shrunken` offers several widths.
"""

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import NamedTuple, TypeGuard

from transformers import PreTrainedConfig

WIDTHS = (64, 128, 256)
"""The least hidden sizes that are tried, one after another: in a thin model some sizes no longer divide each other."""
MULTIPLE = 16
"""Hidden and intermediate sizes are multiples of it, which kernels of experts need."""
VOCABULARY = 128
EXPERTS = 4
EXPERTS_PER_TOKEN = 2
WINDOW = 4
"""Tokens of windows, chunks and blocks: shorter than the samples of a trial, or no border would be inside one."""


class Rule(NamedTuple):
    """How the sizes with such a name shrink."""

    name: re.Pattern[str]
    shrink: Callable[[int, int], int]
    """The size, and by which factor widths shrink."""


def _keep(size: int, factor: int) -> int:
    return size


def _vocabulary(size: int, factor: int) -> int:
    return min(size, VOCABULARY)


def _token(token_id: int, factor: int) -> int:
    return min(token_id, VOCABULARY - 1)


def _experts(size: int, factor: int) -> int:
    return min(size, EXPERTS)


def _experts_per_token(size: int, factor: int) -> int:
    return min(size, EXPERTS_PER_TOKEN)


def _window(size: int, factor: int) -> int:
    return min(size, WINDOW)


def _one(size: int, factor: int) -> int:
    return min(size, 1)


def _width(size: int, factor: int) -> int:
    if size <= 0:
        return size
    return max(1, size // factor)


def _intermediate(size: int, factor: int) -> int:
    if size <= MULTIPLE:
        return size
    thin = size // factor
    return max(MULTIPLE, thin - thin % MULTIPLE)


RULES = (
    Rule(re.compile(r"token_(id|index)$"), _token),
    Rule(re.compile(r"vocab"), _vocabulary),
    Rule(re.compile(r"layer|conv|period|offset|_step|pattern|(^|_)(d|dim)_head$"), _keep),
    Rule(re.compile(r"^(n|topk|num_expert|moe_topk|moe_n)_groups?$"), _one),
    Rule(re.compile(r"per_tok|top_?k|selected_experts|moe_k$"), _experts_per_token),
    Rule(re.compile(r"shared_experts?$"), _keep),
    Rule(re.compile(r"experts$|expert_num$"), _experts),
    Rule(re.compile(r"window|chunk|block_size|floor_scale|local_attention$"), _window),
    Rule(re.compile(r"intermediate|inner|d_ff|ffn"), _intermediate),
    Rule(re.compile(r"hidden|heads?$|embd|d_model|rank$|width|groups?$|d_ssm"), _width),
)
"""The first that fits counts; a size that none fits stays: those of single heads and of states are small."""


def shrunken(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Copies of the configuration with small sizes, from the thinnest on. Layers and their kinds stay."""
    hidden_size = getattr(config.get_text_config(), "hidden_size", None) or min(WIDTHS)
    tried = set()
    for width in WIDTHS:
        factor = hidden_size // _thin(hidden_size, width)
        if factor not in tried:
            tried.add(factor)
            yield _copy(config, factor)


def _thin(hidden_size: int, width: int) -> int:
    """The smallest divisor of the hidden size, from `width` on, that is a multiple of 16; else the hidden size."""
    for divisor in range(width, hidden_size, MULTIPLE):
        if hidden_size % divisor == 0:
            return divisor
    return hidden_size


def _copy(config: PreTrainedConfig, factor: int) -> PreTrainedConfig:
    copy = deepcopy(config)
    vars(copy).pop("quantization_config", None)  # the weights are random
    _shrink(copy, factor)
    return copy


def _shrink(config: PreTrainedConfig, factor: int) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _shrink(value, factor)
            continue
        rule = _rule(name)
        if rule is None:
            continue
        if isinstance(value, list) and value and all(_is_size(entry) for entry in value):
            setattr(config, name, [rule.shrink(entry, factor) for entry in value])
        elif _is_size(value):
            setattr(config, name, rule.shrink(value, factor))


def _rule(name: str) -> Rule | None:
    for rule in RULES:
        if rule.name.search(name):
            return rule
    return None


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
