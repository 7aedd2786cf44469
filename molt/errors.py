"""The exception hierarchy, and the one way an error message is built.

    MoltError
    ├── ConfigError(ValueError)          a setting, or a combination of settings, is wrong
    ├── DataError(ValueError)            a dataset or a template cannot be used
    ├── ResourceError(RuntimeError)      what was asked for is not there
    ├── AgentError(TypeError)            the user's agent file is not an agent
    ├── EngineError(RuntimeError)        an inference engine failed or is gone
    ├── PublicationError(RuntimeError)   weights did not arrive, or are not in use
    ├── TrainingError(RuntimeError)      an optimizer step went wrong
    ├── CheckpointError(RuntimeError)    a checkpoint is missing, torn or of another run
    ├── FailureRateError(RuntimeError)   too many rollouts failed
    └── StalledError(TimeoutError)       nothing moved for longer than the bound

Every message has three parts: the value, the consequence, the fix. Only `MoltError`s are shown to a
user without a traceback.
"""

import difflib
from collections.abc import Iterable


class MoltError(Exception):
    """Base of every error molt raises on purpose. One string argument, so it pickles."""


class ConfigError(MoltError, ValueError):
    pass


class DataError(MoltError, ValueError):
    pass


class ResourceError(MoltError, RuntimeError):
    pass


class AgentError(MoltError, TypeError):
    pass


class EngineError(MoltError, RuntimeError):
    pass


class PublicationError(MoltError, RuntimeError):
    pass


class TrainingError(MoltError, RuntimeError):
    pass


class CheckpointError(MoltError, RuntimeError):
    pass


class FailureRateError(MoltError, RuntimeError):
    pass


class StalledError(MoltError, TimeoutError):
    pass


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest of `known`, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
