"""Trajectory → sample: turns exactly as sampled become one aligned segment."""

from collections.abc import Sequence

import numpy as np

from molt.columns import NOT_GENERATED, TokenColumns, concat, context
from molt.types import Sample, SampleInfo, Turn


def to_sample(turns: Sequence[Turn]) -> Sample:
    """Lay the turns of one monotonic stream out as a `Sample`.

    Example: turn 1 = prompt `p p`, sampled `a b`; turn 2 = prompt `p p a b o o`, sampled `c`:

        token_ids  p  p  a  b  o  o  c
        versions  -1 -1  3  3 -1 -1  4

    Raises `AssertionError` if a turn's prompt does not extend the stream before it token for token:
    then something was re-tokenised, and training on it would train on tokens nobody sampled.
    """
    parts: list[TokenColumns] = []
    stream = _stream(turns[-1])
    end = 0
    for turn in turns:
        start = len(turn.prompt_ids)
        assert start >= end, f"turn starts at token {start}, inside the turn before it that ends at {end}"
        parts.append(context(turn.prompt_ids[end:]))
        parts.append(turn.sampled)
        end = start + len(turn.token_ids)
        unchanged = np.array_equal(stream[:end], _stream(turn))
        assert unchanged, f"the stream of {end} tokens was rewritten after sampling"
    return Sample(concat(parts))


def describe(sample: Sample) -> SampleInfo:
    """What the driver keeps of a sample."""
    mask = sample.mask
    oldest_version = NOT_GENERATED
    if mask.any():
        oldest_version = int(sample.versions[mask].min())
    return SampleInfo(
        tokens=len(sample),
        trained_tokens=int(mask.sum()),
        oldest_version=oldest_version,
        media=len(sample.media),
    )


def _stream(turn: Turn) -> np.ndarray:
    """int32 `[P + T]`: the prompt and what was sampled after it."""
    return np.concatenate([turn.prompt_ids, turn.token_ids]).astype(np.int32)
