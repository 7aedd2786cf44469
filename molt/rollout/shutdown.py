"""Whether a run is to stop, and why: the one place that knows.

Whoever finds a reason tells it here; the loop acts on it between two steps, where trainer and ledger agree and can
be saved.

| who tells                                   | method          | what the loop does                                  |
|---------------------------------------------|-----------------|-----------------------------------------------------|
| SIGTERM, Ctrl-C                             | `request`       | ends the step, saves, exits with 0                  |
| producer: failure rate, unusable agent      | `end_of_groups` | raises the error when it needs the next batch       |
| engine and runner watchers, weight sync     | `fail`          | ends the step, drops the evaluation, saves, raises  |
"""

import asyncio
from collections.abc import Callable

from molt.errors import MoltError


class Shutdown:
    """See the module docstring. The first error is kept."""

    def __init__(self) -> None:
        self.requested = False
        """A signal asks for the end; no further batch is trained."""
        self.error: MoltError | None = None
        self.failed = False
        """`error` stops the run after the present step, even if that was the last one."""
        self.immediate = asyncio.Event()
        """Set when the run ends after the present step: an evaluation or an engine is not waited for any longer."""
        self._listeners: list[Callable[[], None]] = []

    def request(self) -> None:
        """Save after the present step, and end without an error."""
        self.requested = True
        self.immediate.set()
        self._notify()

    def end_of_groups(self, error: MoltError) -> None:
        """No further group will come. A learner that needs none may finish."""
        self.error = self.error or error
        self._notify()

    def fail(self, error: MoltError) -> None:
        """Save after the present step, and raise the error."""
        self.error = self.error or error
        self.failed = True
        self.immediate.set()
        self._notify()

    def generation_restarts(self) -> None:
        """Groups are generated anew from a checkpoint: what ended them before no longer counts."""
        if not self.failed:
            self.error = None

    def call_on_change(self, listener: Callable[[], None]) -> None:
        """`listener` is called whenever there is a new reason to stop."""
        self._listeners.append(listener)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
