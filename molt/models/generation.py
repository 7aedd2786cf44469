"""The generation config of an exported model: it can be saved, and generation ends where training taught it to end.

transformers refuses to save a config whose settings do not fit together, though it loads one: some models ship
`do_sample: false` with a temperature.
"""

import copy
from collections.abc import Iterable, Iterator

from transformers import GenerationConfig

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def exported_generation_config(config: GenerationConfig, end_ids: Iterable[int]) -> GenerationConfig:
    """A config that can be saved, with `end_ids` among its end tokens; otherwise as it was, as far as that is valid."""
    repaired = savable(config)
    ends = set(end_ids)
    if repaired.eos_token_id is not None:
        before = repaired.eos_token_id
        ends.update(before if isinstance(before, list) else [before])
    if len(ends) == 1:
        repaired.eos_token_id = ends.pop()
    elif ends:
        repaired.eos_token_id = sorted(ends)
    return repaired


def savable(config: GenerationConfig) -> GenerationConfig:
    """A copy that transformers saves, with as few changes as possible."""
    return next(candidate for candidate in _candidates(config) if save_problem(candidate) is None)


def changes(before: GenerationConfig, after: GenerationConfig) -> str:
    """`do_sample True, min_p None`: what differs, in words."""
    was = before.to_dict()
    differing = [f"{name} {value}" for name, value in after.to_dict().items() if was.get(name) != value]
    return ", ".join(differing)


def save_problem(config: GenerationConfig) -> str | None:
    """Why transformers would refuse to save it, in a line; None: it would not."""
    try:
        config.validate(strict=True)
    except ValueError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return lines[min(1, len(lines) - 1)].lstrip("- ")  # after a heading, if there are several
    return None


def _candidates(config: GenerationConfig) -> Iterator[GenerationConfig]:
    """From the config as it is to an empty one."""
    yield copy.deepcopy(config)

    sampling = copy.deepcopy(config)  # a temperature says that the model is meant to be sampled
    sampling.do_sample = True
    yield sampling

    tokens = _values(config, TOKENS)
    yield GenerationConfig(**tokens, **_values(config, SAMPLING), do_sample=True)
    yield GenerationConfig(**tokens)
    tokens.pop("pad_token_id", None)
    yield GenerationConfig(**tokens)
    yield GenerationConfig()


def _values(config: GenerationConfig, names: Iterable[str]) -> dict[str, object]:
    """Those that are set."""
    values = {}
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            values[name] = value
    return values
