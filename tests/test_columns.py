"""Token columns: whatever is cut, joined or hidden, entry t of every column still describes token t."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.columns import (
    LOGPROBS,
    NOT_GENERATED,
    TOKEN_IDS,
    VERSIONS,
    Column,
    TokenColumns,
    concat,
    context,
    declaration,
    declared,
    token_columns,
)

SURPRISE = Column("surprise", "float32", fill=0.5)
"""Describes sampling."""
ROUTES = Column("routes", "uint8", fill=255, shape=(2, 3), generated_only=False)
"""Describes any token, as the experts of a forward do."""


def stream(ids: list[int], *, surprise: bool, routes: bool) -> TokenColumns:
    """Every entry of every column is a function of its token: id 0 to 9, generated where it is even."""
    tokens = np.array(ids, np.int32)
    generated = tokens % 2 == 0
    columns = token_columns(tokens, np.where(generated, tokens, NOT_GENERATED), np.where(generated, -tokens / 8, 0))
    if surprise:
        columns = columns.with_column(SURPRISE, np.where(generated, tokens / 4, 0.5))
    if routes:
        columns = columns.with_column(ROUTES, np.broadcast_to(tokens[:, None, None], (len(ids), 2, 3)))
    return columns


STREAMS = st.builds(stream, st.lists(st.integers(0, 9), max_size=8), surprise=st.booleans(), routes=st.booleans())


def assert_each_entry_is_that_of_its_token(columns: TokenColumns) -> None:
    for t, token in enumerate(columns.token_ids.tolist()):
        generated = columns.versions[t] >= 0
        assert columns.versions[t] == (token if generated else NOT_GENERATED)
        assert columns.logprobs[t] == (-token / 8 if generated else 0)
        for column in columns.further:
            entry = columns.values(column)[t]
            if column == SURPRISE:
                assert entry in ((token / 4, 0.5) if generated else (0.5,))
            else:
                assert set(entry.ravel().tolist()) in ({token}, {255})


@given(st.lists(STREAMS, max_size=4), st.data())
def test_any_cutting_joining_and_hiding_keeps_entries_with_their_tokens(parts, data):
    whole = concat(parts)
    assert whole.token_ids.tolist() == [token for part in parts for token in part.token_ids.tolist()]
    assert_each_entry_is_that_of_its_token(whole)

    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    part = whole.slice(start, stop)
    assert part.token_ids.tolist() == whole.token_ids[start:stop].tolist()
    assert_each_entry_is_that_of_its_token(part)

    hidden = np.array(data.draw(st.lists(st.booleans(), min_size=len(whole), max_size=len(whole))), bool)
    masked = whole.mask_out(hidden)
    assert_each_entry_is_that_of_its_token(masked)
    assert (masked.mask == (whole.mask & ~hidden)).all()
    for column in whole.further:
        kept = masked.values(column)
        before = whole.values(column)
        assert np.array_equal(kept[~hidden], before[~hidden])
        assert np.array_equal(kept[hidden], before[hidden]) or column.generated_only
        if column.generated_only:
            assert (kept[hidden] == column.fill).all()


@given(st.lists(STREAMS, min_size=1, max_size=3), st.integers(0, 24))
def test_cutting_and_joining_again_changes_nothing(parts, cut):
    whole = concat(parts)
    cut = min(cut, len(whole))
    again = concat([whole.slice(0, cut), whole.slice(cut, len(whole))])
    assert set(again.arrays) == set(whole.arrays)
    for column, array in whole.arrays.items():
        assert again.arrays[column].dtype == column.dtype and np.array_equal(again.arrays[column], array)


def test_hiding_changes_a_copy():
    whole = stream([2, 4], surprise=True, routes=True)
    whole.mask_out(slice(None))
    assert whole.versions.tolist() == [2, 4] and whole.values(SURPRISE).tolist() == [0.5, 1.0]


def test_a_context_is_sampled_by_nobody():
    columns = context([7, 8])
    assert columns.versions.tolist() == [-1, -1] and columns.logprobs.tolist() == [0, 0] and not columns.mask.any()
    assert (columns.token_ids.dtype, columns.versions.dtype, columns.logprobs.dtype) == (np.int32, np.int32, np.float32)


def test_another_process_needs_no_declaration():
    """What is pickled, or written to files, says all there is to know."""
    columns = stream([2, 3], surprise=True, routes=True)
    again = pickle.loads(pickle.dumps(columns))
    assert again.further == (ROUTES, SURPRISE) and np.array_equal(again.values(ROUTES), columns.values(ROUTES))
    for column in (SURPRISE, ROUTES):
        assert declared(json.loads(json.dumps(declaration(column)))) == column


def test_arrays_that_are_not_aligned_are_refused():
    with pytest.raises(ValueError, match="3 token_ids, 2 versions, 3 logprobs; entry t"):
        TokenColumns({TOKEN_IDS: np.zeros(3, int), VERSIONS: np.zeros(2, int), LOGPROBS: np.zeros(3)})
    with pytest.raises(ValueError, match="2 token_ids, 2 versions, 2 logprobs, 1 surprise"):
        token_columns([1, 2], [0, 0], [0, 0]).with_column(SURPRISE, [1.0])


def test_what_every_stream_has_cannot_be_left_out():
    with pytest.raises(ValueError, match="without logprobs"):
        TokenColumns({TOKEN_IDS: np.zeros(3, int), VERSIONS: np.zeros(3, int)})


def test_one_name_has_one_declaration():
    other = Column("surprise", "float32", fill=0.0)
    one = token_columns([1], [0], [0]).with_column(SURPRISE, [1.0])
    two = token_columns([1], [0], [0]).with_column(other, [1.0])
    with pytest.raises(ValueError, match="`surprise` is declared as"):
        concat([one, two])
    with pytest.raises(ValueError, match="`surprise` is declared as"):
        one.with_column(other, [1.0])


def test_entries_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"`routes` has entries of shape \(2, 3\), these have \(2,\)"):
        context([1]).with_column(ROUTES, [[1, 2]])


@pytest.mark.parametrize("name", ["two words", "class", "reward", "text", "9th"])
def test_a_name_that_files_cannot_take_is_refused(name):
    with pytest.raises(ValueError, match="cannot be named"):
        Column(name, "float32", fill=0)
