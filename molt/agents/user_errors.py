"""What a user's code raises, as an `InfraFailure` that the driver can read, and as nothing that ends a process.

A `SystemExit` that leaves a task ends its event loop, and with it every other episode of the process; other exceptions
that are no `Exception` (time limits of some libraries, test outcomes, panics of Rust code) pass `except Exception`.
"""

import asyncio
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from molt.errors import MoltError
from molt.types import InfraFailure
from molt.user_module import is_raised_by_user, raised_at

PASSING = (Exception, asyncio.CancelledError, GeneratorExit)
"""What may leave a task: errors that a fault boundary catches, and the ends of a coroutine."""


def failure_of(error: BaseException) -> InfraFailure:
    """A failure whose reason is the type of the error, with its text and the user's line that led to it.

    Of the errors of a task group it is the first.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, InfraFailure):
        return InfraFailure(str(error.reason), str(error.detail))
    return InfraFailure(type(error).__name__, _detail(error))


@contextmanager
def contained() -> Iterator[None]:
    """Raises `InfraFailure` for what the block raises beside `PASSING`."""
    try:
        yield
    except PASSING:
        raise
    except BaseException as error:  # fault boundary: one call of the user's code
        raise failure_of(error) from error


def contain_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """From now on no task of the loop can end it, not even one that the user's code starts."""
    loop.set_task_factory(_contained_task)


class ContainedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine that raises `InfraFailure` for what it would raise beside `PASSING`."""

    def __init__(self, inside: Coroutine[Any, Any, Any]):
        self._inside = inside

    def __getattr__(self, name: str) -> Any:
        """Its name and its state (`cr_frame`, ...), for whoever looks at a task's coroutine: anyio, debuggers."""
        return getattr(self._inside, name)

    def send(self, value: Any, /) -> Any:
        try:
            return self._inside.send(value)
        except PASSING:
            raise
        except BaseException as error:  # fault boundary: one task
            raise failure_of(error) from error

    def throw(self, kind: Any, value: Any = None, traceback: TracebackType | None = None, /) -> Any:
        error = kind if value is None else value
        try:
            return self._inside.throw(error)
        except PASSING:
            raise
        except BaseException as raised:  # fault boundary: one task
            raise failure_of(raised) from raised

    def close(self) -> None:
        self._inside.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inside.__await__()


def _contained_task(loop: asyncio.AbstractEventLoop, inside: Any, **options: Any) -> "asyncio.Task[Any]":
    """options: the name and the context of the task, where the version of Python passes them."""
    return asyncio.Task(ContainedCoroutine(inside), loop=loop, **options)


def _detail(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, MoltError) and not is_raised_by_user(error):
        return text  # it names what is wrong; the line of molt that found it would mislead
    place = f"at {raised_at(error)}"
    if not text:
        return place
    return f"{text} {place}"
