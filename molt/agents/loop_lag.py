"""How late an event loop is, whether its own code or a busy machine delays it, and which line blocks it.

The loop leaves a mark `LAG_S` after `LAG_S`. Another thread can read the age of the mark while the loop is blocked.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from molt.user_module import running_at

LAG_S = 0.05
"""Between two measurements of an event loop's lag."""
LOOK_S = 0.5
"""Between two looks of a thread at a loop."""
BLOCKED_S = 3.0
"""Longer blocks are reported while they last."""
QUIET_S = 300.0
"""The same line is not reported twice within this time."""


@dataclass(frozen=True)
class Block:
    """What blocks an event loop."""

    place: str
    """`FILE:LINE`, of the user's code if that is being run."""
    seconds: float
    """Up to now, without the time in which the machine had no core for the loop's thread."""


@dataclass(frozen=True)
class Mark:
    """The last sign of life of a loop."""

    thread: int
    """Of the loop, as of `threading.get_ident`."""
    native_thread: int
    time: float
    """As of `time.monotonic`."""
    waited_s: float
    """For a core, until then."""


def waited_for_core_s(native_thread: int) -> float:
    """Seconds in which a thread of this process could have run, but no core was free; 0 where the kernel does not tell.

    Unlike CPU time it does not count a thread that sleeps or waits for a socket: there its own code blocks it.
    Source: /proc/PID/schedstat, Documentation/scheduler/sched-stats.rst of Linux.
    """
    try:
        fields = Path(f"/proc/self/task/{native_thread}/schedstat").read_text().split()
    except OSError:
        return 0.0
    return int(fields[1]) / 1e9


class LoopLag:
    """How much later than requested an event loop wakes a sleeper: code that blocks it blocks every rollout."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._worst_s = 0.0
        self._worst_blocked_s = 0.0
        self._lock = threading.Lock()
        """Held to change the two numbers: several threads do."""
        self._mark: Mark | None = None
        """None while nothing is measured."""

    async def run(self) -> None:
        """Measure, for ever."""
        mark = self._marked()
        try:
            while True:
                await asyncio.sleep(LAG_S)
                before = mark
                mark = self._marked()
                self._compare(before, mark)
        finally:
            self._mark = None
            self.ended.set()

    def take_s(self) -> float:
        """Seconds, the worst since the last call, with a delay that lasts. Any thread may ask."""
        mark = self._mark
        lasting = 0.0 if mark is None else time.monotonic() - mark.time - LAG_S
        with self._lock:
            worst = self._worst_s
            self._worst_s = 0.0
        return max(worst, lasting)

    def take_blocked_s(self) -> float:
        """As `take_s`, without the time in which the machine had no core for the loop."""
        mark = self._mark
        lasting = 0.0 if mark is None else _blocked_s(mark)
        with self._lock:
            worst = self._worst_blocked_s
            self._worst_blocked_s = 0.0
        return max(worst, lasting)

    def lost_its_thread(self) -> bool:
        """Whether the thread of the loop ended while it was measured. Another thread may ask."""
        mark = self._mark
        return mark is not None and mark.thread not in sys._current_frames()

    def blocked(self, after_s: float) -> Block | None:
        """What has blocked the loop for longer than `after_s` and still does. Another thread may ask."""
        mark = self._mark
        if mark is None:
            return None
        seconds = _blocked_s(mark)
        if seconds <= after_s:
            return None
        frame = sys._current_frames().get(mark.thread)
        place = None
        if frame is not None:
            place = running_at(frame)
        if place is None:  # the loop itself: it is about to go on
            return None
        return Block(place, seconds)

    def _compare(self, before: Mark, mark: Mark) -> None:
        lag = mark.time - before.time - LAG_S
        waited = mark.waited_s - before.waited_s
        with self._lock:
            self._worst_s = max(self._worst_s, lag)
            self._worst_blocked_s = max(self._worst_blocked_s, lag - waited)

    def _marked(self) -> Mark:
        native_thread = threading.get_native_id()
        self._mark = Mark(
            thread=threading.get_ident(),
            native_thread=native_thread,
            time=time.monotonic(),
            waited_s=waited_for_core_s(native_thread),
        )
        return self._mark


def _blocked_s(mark: Mark) -> float:
    """How long the loop has been late since its mark, without the time in which there was no core for it."""
    waited = waited_for_core_s(mark.native_thread) - mark.waited_s
    return time.monotonic() - mark.time - LAG_S - waited


class BlockReporter:
    """Finds out which blocks of a loop are to be reported: each line once in `QUIET_S`."""

    def __init__(self, lag: LoopLag, after_s: float = BLOCKED_S):
        self.lag = lag
        self.after_s = after_s
        self._reported: dict[str, float] = {}
        """When a line was reported, as of `time.monotonic`."""

    def look(self) -> Block | None:
        """A block that is to be reported now."""
        block = self.lag.blocked(self.after_s)
        if block is None:
            return None
        now = time.monotonic()
        if now - self._reported.get(block.place, float("-inf")) < QUIET_S:
            return None
        self._reported[block.place] = now
        return block


def report_from_thread(
    lag: LoopLag, report: Callable[[Block], None], on_lost_loop: Callable[[], None]
) -> threading.Thread:
    """Start a thread that looks at the loop as long as it is measured, and calls `report` there.

    on_lost_loop: called there once, when the loop's thread ended though it was measured.
    """
    reporter = BlockReporter(lag)

    def watch() -> None:
        while not lag.ended.wait(LOOK_S):
            if lag.lost_its_thread():
                on_lost_loop()
                return
            block = reporter.look()
            if block is not None:
                report(block)

    thread = threading.Thread(target=watch, name="molt-loop-lag", daemon=True)
    thread.start()
    return thread
