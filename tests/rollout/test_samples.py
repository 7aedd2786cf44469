"""Turns become one aligned segment: nothing is lost, nothing is invented."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.columns import NOT_GENERATED
from molt.rollout.samples import describe, to_sample
from molt.types import SampleInfo, Turn
from tests.streams import turn_from


def turn(prompt_ids, token_ids, versions, logprobs=None) -> Turn:
    n = len(token_ids)
    return turn_from(
        np.array(prompt_ids, np.int32),
        np.array(token_ids, np.int32),
        np.array([-0.5] * n if logprobs is None else logprobs, np.float32),
        np.array([versions] * n if isinstance(versions, int) else versions, np.int32),
        "stop",
    )


def test_the_example_of_the_docstring():
    p, a, b, o, c = 1, 2, 3, 4, 5
    sample = to_sample([turn([p, p], [a, b], 3, [-0.1, -0.2]), turn([p, p, a, b, o, o], [c], 4, [-0.3])])
    assert sample.token_ids.tolist() == [p, p, a, b, o, o, c]
    assert sample.versions.tolist() == [-1, -1, 3, 3, -1, -1, 4]
    assert sample.logprobs.tolist() == np.array([0, 0, -0.1, -0.2, 0, 0, -0.3], np.float32).tolist()
    assert (sample.token_ids.dtype, sample.versions.dtype, sample.logprobs.dtype) == (np.int32, np.int32, np.float32)
    assert sample.mask.tolist() == [False, False, True, True, False, False, True]
    assert describe(sample) == SampleInfo(tokens=7, trained_tokens=3, oldest_version=3)


def test_a_turn_that_spans_a_publication_keeps_both_versions():
    sample = to_sample([turn([1], [2, 3, 4], [6, 6, 7])])
    assert sample.versions.tolist() == [-1, 6, 6, 7]
    assert describe(sample).oldest_version == 6


def test_nothing_generated():
    sample = to_sample([turn([1, 2], [], [])])
    assert describe(sample) == SampleInfo(tokens=2, trained_tokens=0, oldest_version=NOT_GENERATED)


@pytest.mark.parametrize(
    "second",
    [
        turn([1, 9, 3, 4], [5], 0),  # a sampled token was changed
        turn([9, 2, 3, 4], [5], 0),  # the prompt was changed
        turn([1, 2], [5], 0),  # a sampled token was dropped
        turn([1], [2, 3], 0),  # the same prompt again: another branch, not a continuation
    ],
)
def test_a_rewritten_stream_is_refused(second):
    with pytest.raises(AssertionError, match=r"rewritten after sampling|inside the turn before it"):
        to_sample([turn([1], [2, 3], 0), second])


@settings(deadline=None)
@given(st.data())
def test_sampled_positions_are_the_turns_tokens_and_everything_else_is_context(data):
    ids, number = st.lists(st.integers(0, 99), max_size=5), st.floats(-20, 0, width=32)
    turns, stream = [], data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=5))
    for _ in range(data.draw(st.integers(1, 4))):
        sampled = data.draw(ids)
        versions = data.draw(st.lists(st.integers(0, 9), min_size=len(sampled), max_size=len(sampled)))
        logprobs = data.draw(st.lists(number, min_size=len(sampled), max_size=len(sampled)))
        turns.append(turn(stream, sampled, versions, logprobs))
        stream = [*stream, *sampled, *data.draw(ids)]
    sample = to_sample(turns)
    mask = sample.mask
    for name in ("token_ids", "versions", "logprobs"):
        expected = np.concatenate([getattr(t, name) for t in turns])
        assert getattr(sample, name)[mask].tolist() == expected.tolist()
    assert sample.token_ids.tolist() == [*turns[-1].prompt_ids, *turns[-1].token_ids]
    assert (sample.versions[~mask] == NOT_GENERATED).all() and not sample.logprobs[~mask].any()
