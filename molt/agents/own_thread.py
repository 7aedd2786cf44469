"""A thread for the functions of one episode that are no coroutines, so that they block nothing but themselves."""

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class _Work:
    """A call, and where its answer goes."""

    function: Callable[[], Any]
    future: "Future[Any]"


class OwnThread:
    """Runs functions one after another, all in one thread: some libraries' objects may be used in one thread alone.

    It is started by the first call. A shared pool would be used up by agents that wait for model calls.
    """

    def __init__(self, name: str):
        self.name = name
        self._work: queue.SimpleQueue[_Work | None] | None = None
        self._last: Future[Any] | None = None

    async def call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """What the function returns. Cancelling leaves it behind, and the next call gets a new thread."""
        if self._last is not None and not self._last.done():
            self.end()
        if self._work is None:
            self._work = queue.SimpleQueue()
            # A daemon: a function that never returns does not keep the process.
            threading.Thread(target=_serve, args=(self._work,), name=self.name, daemon=True).start()
        context = contextvars.copy_context()
        future: Future[Any] = Future()
        self._last = future
        self._work.put(_Work(partial(context.run, function, *arguments), future))
        return await asyncio.wrap_future(future)

    def end(self) -> None:
        """The thread ends when its function has returned."""
        if self._work is not None:
            self._work.put(None)
            self._work = None


def _serve(calls: "queue.SimpleQueue[_Work | None]") -> None:
    while True:
        work = calls.get()
        if work is None:
            return
        if work.future.set_running_or_notify_cancel():
            _run(work)
        del work  # what it returned is not kept until the next call


def _run(work: _Work) -> None:
    try:
        answer = work.function()
    except StopIteration as error:  # a future cannot hold one, and would never be done
        work.future.set_exception(RuntimeError(f"the function raised StopIteration: {error}"))
    except BaseException as error:  # raised again where the call is awaited
        work.future.set_exception(error)
    else:
        work.future.set_result(answer)
