"""What a user's code raises, as an `InfraFailure` that the driver can read."""

import asyncio

from molt.errors import MoltError
from molt.types import InfraFailure, ReplaceGroup
from molt.user_module import is_raised_by_user, raised_at


def task_is_cancelled() -> bool:
    """Whether somebody cancelled the current task."""
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0


def failure_of(error: BaseException) -> InfraFailure:
    """A failure whose reason is the type of the error, with its text and the user's line that led to it."""
    return InfraFailure(type(error).__name__, _detail(error))


def without_user_types(failure: InfraFailure) -> InfraFailure:
    """A plain copy: the driver cannot import a user's subclass, and a traceback keeps its frames alive."""
    return InfraFailure(str(failure.reason), str(failure.detail))


def plain_replacement(replaced: ReplaceGroup) -> ReplaceGroup:
    """As `without_user_types`."""
    return ReplaceGroup(str(replaced.reason), str(replaced.detail))


def _detail(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, MoltError) and not is_raised_by_user(error):
        return text  # it names what is wrong; the line of molt that found it would mislead
    place = f"at {raised_at(error)}"
    if not text:
        return place
    return f"{text} {place}"
