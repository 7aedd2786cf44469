"""Token columns: per-token arrays of one stream that are cut, joined, hidden, saved and loaded together.

A `Column` is declared once: its name, its dtype, the shape of an entry, what stands where nothing is known, and whether
it describes sampling. `TokenColumns` holds an array for each column, and entry *t* of each describes token *t*. It
carries the declarations, so a process that never saw one (a trainer, a reader of files) treats the column alike.

Everything that holds tokens holds a `TokenColumns`: a turn, a node of the token tree, a sample, the buffer. A further
column is one constant at whoever fills it:

    ENTROPY = Column("entropy", "float32", fill=0.0)
    sampled = turn.sampled.with_column(ENTROPY, entropies)

and it arrives at the trainer (`PolicyMicroBatch.columns`), in checkpoints, in dumps and in the stored rollouts.
"""

import keyword
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

NOT_GENERATED = -1
"""The version of a token that the policy did not sample (prompt, observation, template)."""

Fill = int | float | bool
Chosen = np.ndarray | slice
"""Some of T tokens: bool `[T]`, or a slice."""


@dataclass(frozen=True)
class Column:
    """The declaration of a column. Equal declarations are the same column."""

    name: str
    """Its name in files and metrics: a Python identifier."""
    dtype: str
    """Of NumPy: `float32`, `int32`, `uint8`, `bool`, ..."""
    fill: Fill
    """The entry of a token that nobody described."""
    shape: tuple[int, ...] = ()
    """Of an entry; () for a number."""
    generated_only: bool = True
    """It describes sampling, so it holds `fill` wherever `versions` says that nothing was sampled. False: it describes
    tokens of any kind, and stays when a token is only context."""

    def __post_init__(self):
        if not self.name.isidentifier() or keyword.iskeyword(self.name) or self.name in RESERVED:
            raise ValueError(
                f"a column cannot be named {self.name!r}: it is a name in files. Use a Python identifier other than "
                f"{', '.join(sorted(RESERVED))}."
            )

    def __hash__(self) -> int:
        """Of the name alone: columns are keys of every stream, and a name is declared once."""
        return hash(self.name)

    def filled(self, length: int) -> np.ndarray:
        """`[length, *shape]` of `fill`."""
        return np.full((length, *self.shape), self.fill, self.dtype)

    def array(self, values: Any) -> np.ndarray:
        """`values` as an array of this column. Raises `ValueError` for entries of another shape."""
        array = np.asarray(values, self.dtype)
        if array.size == 0 and array.ndim == 1:
            return self.filled(0)
        if array.shape[1:] != self.shape:
            raise ValueError(
                f"column `{self.name}` has entries of shape {self.shape}, these have {array.shape[1:]}: they would be "
                "read as other tokens'. Give one entry of that shape per token."
            )
        return array


RESERVED = frozenset(
    {
        "format",
        "columns",
        "group_id",
        "rollout",
        "segment",
        "reward",
        "score",
        "advantage",
        "outcome",
        "truncated",
        "cut",
        "version_trained",
        "prompt_tokens",
        "text",
        "runs",
    }
)
"""Names that buffer files and stored rollouts use for something else."""

TOKEN_IDS = Column("token_ids", "int32", fill=0, generated_only=False)
VERSIONS = Column("versions", "int32", fill=NOT_GENERATED)
"""Weights that sampled token t, or `NOT_GENERATED`. `versions >= 0` is the loss mask at birth."""
LOGPROBS = Column("logprobs", "float32", fill=0.0)
"""Log-prob of token t under the distribution that it was sampled from."""

TURN_REWARD = Column("turn_reward", "float32", fill=0.0)
"""At the last token of a turn, what the environment gave for it. Only where a turn before the last earned something."""

ALWAYS = (TOKEN_IDS, VERSIONS, LOGPROBS)
"""What every stream has; other columns may be missing, which means `fill` everywhere."""


@dataclass(frozen=True)
class CandidateColumns:
    """The k likeliest tokens at each sampled token, under the distribution that it was sampled from."""

    ids: Column
    logprobs: Column


def candidate_columns(k: int) -> CandidateColumns:
    """The two columns that score centering reads (`algo/centering.py`), with k entries per token."""
    return CandidateColumns(
        ids=Column("candidate_ids", "int32", fill=0, shape=(k,)),
        logprobs=Column("candidate_logprobs", "float32", fill=0.0, shape=(k,)),
    )


@dataclass(frozen=True, eq=False)
class TokenColumns:
    """The columns of T tokens: an array `[T, *shape]` for each."""

    arrays: Mapping[Column, np.ndarray]

    def __post_init__(self):
        lengths = {column.name: len(array) for column, array in self.arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"columns are not aligned: {_table(lengths)}; entry t of each must describe token t")
        if len(lengths) < len(self.arrays):
            raise ValueError(f"two columns have one name among {sorted(lengths)}, with different declarations")
        missing = [column.name for column in ALWAYS if column not in self.arrays]
        if missing:
            raise ValueError(f"a stream of tokens without {', '.join(missing)}: nothing can be trained without them")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def token_ids(self) -> np.ndarray:
        """int32 `[T]`."""
        return self.arrays[TOKEN_IDS]

    @property
    def versions(self) -> np.ndarray:
        """int32 `[T]`, weights that sampled token t, or `NOT_GENERATED`."""
        return self.arrays[VERSIONS]

    @property
    def logprobs(self) -> np.ndarray:
        """float32 `[T]`, behaviour log-prob of token t, 0 where it was not generated."""
        return self.arrays[LOGPROBS]

    @property
    def mask(self) -> np.ndarray:
        """bool `[T]`, True where the policy generated the token."""
        return self.versions >= 0

    @property
    def further(self) -> tuple[Column, ...]:
        """The columns besides those of `ALWAYS`, by name."""
        further = [column for column in self.arrays if column not in ALWAYS]
        return tuple(sorted(further, key=_name))

    def values(self, column: Column) -> np.ndarray:
        """`[T, *shape]` of a column; `fill` everywhere if the stream does not have it."""
        if column in self.arrays:
            return self.arrays[column]
        self._refuse_another(column)
        return column.filled(len(self))

    def with_column(self, column: Column, values: Any) -> "TokenColumns":
        """The same tokens with `values`, `[T, *shape]`, as this column. Raises `ValueError` where they do not fit."""
        self._refuse_another(column)
        return TokenColumns({**self.arrays, column: column.array(values)})

    def slice(self, start: int, stop: int) -> "TokenColumns":
        """Tokens `start` to `stop`, as views."""
        return TokenColumns({column: array[start:stop] for column, array in self.arrays.items()})

    def mask_out(self, tokens: Chosen) -> "TokenColumns":
        """The same stream with some tokens as context: nobody sampled them here."""
        arrays = {}
        for column, array in self.arrays.items():
            if column.generated_only:
                array = array.copy()
                array[tokens] = column.fill
            arrays[column] = array
        return TokenColumns(arrays)

    def _refuse_another(self, column: Column) -> None:
        for present in self.arrays:
            if present.name == column.name and present != column:
                raise ValueError(f"column `{column.name}` is declared as {present} and as {column}: declare it once")


def token_columns(token_ids: Any, versions: Any, logprobs: Any) -> TokenColumns:
    """The columns that every stream has, each `[T]`."""
    return TokenColumns(
        {
            TOKEN_IDS: TOKEN_IDS.array(token_ids),
            VERSIONS: VERSIONS.array(versions),
            LOGPROBS: LOGPROBS.array(logprobs),
        }
    )


def context(token_ids: Any) -> TokenColumns:
    """Tokens that the policy did not sample: a prompt, an observation."""
    ids = TOKEN_IDS.array(token_ids)
    return token_columns(ids, VERSIONS.filled(len(ids)), LOGPROBS.filled(len(ids)))


def concat(parts: Sequence[TokenColumns]) -> TokenColumns:
    """The parts end to end. A column that only some of them have is `fill` in the others.

    Raises `ValueError` for two declarations of one name.
    """
    if not parts:
        return context([])
    columns: dict[Column, None] = {}
    for part in parts:
        columns.update(dict.fromkeys(part.arrays))
    return TokenColumns({column: np.concatenate([part.values(column) for part in parts]) for column in columns})


def declaration(column: Column) -> dict[str, Any]:
    """A column's declaration as JSON."""
    return asdict(column)


def declared(record: Mapping[str, Any]) -> Column:
    """Inverse of `declaration`."""
    return Column(
        name=record["name"],
        dtype=record["dtype"],
        fill=record["fill"],
        shape=tuple(record["shape"]),
        generated_only=record["generated_only"],
    )


def _name(column: Column) -> str:
    return column.name


def _table(lengths: Mapping[str, int]) -> str:
    return ", ".join(f"{length} {name}" for name, length in lengths.items())
