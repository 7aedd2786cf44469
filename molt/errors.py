"""The exception hierarchy, and the one way an error message is built.

    MoltError
    ├── ConfigError(ValueError)
    ├── DataError(ValueError)
    │   └── UnusableRow
    ├── StructureError(ValueError)
    ├── ResourceError(RuntimeError)
    ├── AgentError(TypeError)
    ├── LostError(RuntimeError)
    │   └── EngineError
    ├── PublicationError(RuntimeError)
    │   └── SilentEngineError
    ├── TrainingError(RuntimeError)
    │   ├── BreakerError
    │   └── RankLostError (also a LostError)
    ├── CheckpointError(RuntimeError)
    ├── FailureRateError(RuntimeError)
    ├── NoProgressError(RuntimeError)
    └── StalledError(TimeoutError)

Every message has three parts: the value, the consequence, the fix. Only `MoltError`s are shown to a
user without a traceback.
"""

import difflib
from collections.abc import Iterable


class MoltError(Exception):
    """Base of every error molt raises on purpose. One string argument, so it pickles."""


class ConfigError(MoltError, ValueError):
    """A setting, or a combination of settings, is wrong."""


class DataError(MoltError, ValueError):
    """A dataset or a template cannot be used."""


class UnusableRow(DataError):
    """One row cannot be used. The argument is the reason, the same text for every row it applies to."""


class StructureError(MoltError, ValueError):
    """The engine cannot enforce a structure that a client wants an answer to have."""


class ResourceError(MoltError, RuntimeError):
    """The machine or the cluster has less than the settings ask for."""


class AgentError(MoltError, TypeError):
    """The user's agent file is not an agent."""


class LostError(MoltError, RuntimeError):
    """Processes are gone for good: a new driver on a healthy machine could continue."""


class EngineError(LostError):
    """An inference engine failed or is gone."""


class PublicationError(MoltError, RuntimeError):
    """Weights did not arrive, or are not in use. worker: the engine worker that has wrong ones, if one is known."""

    def __init__(self, message: str, worker: int | None = None):
        super().__init__(message)
        self.worker = worker


class SilentEngineError(PublicationError):
    """An engine died or did not answer in a weight sync. worker: the first of the engine's workers."""


class TrainingError(MoltError, RuntimeError):
    """An optimizer step went wrong."""


class BreakerError(TrainingError):
    """Training diverges: the breaker tripped too often."""


class RankLostError(TrainingError, LostError):
    """A rank is dead or does not answer: its part of the weights is lost, the last checkpoint is not."""


class CheckpointError(MoltError, RuntimeError):
    """A checkpoint is missing, torn or of another run."""


class FailureRateError(MoltError, RuntimeError):
    """Too many rollouts failed."""


class NoProgressError(MoltError, RuntimeError):
    """Group after group was replaced, and none was kept for training."""


class StalledError(MoltError, TimeoutError):
    """Nothing made progress for longer than the bound."""


def first_error(errors: BaseExceptionGroup[MoltError]) -> MoltError:
    """The first error inside nested groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, MoltError)
    return error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest of `known`, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    if not near:
        return ""
    return f" Did you mean {near[0]!r}?"


def plural(count: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def described(error: BaseException) -> str:
    """`KeyError: 'x'`: the type and the text of an error, as Python prints it."""
    text = str(error)
    name = type(error).__name__
    if not text:
        return name
    return f"{name}: {text}"
