"""Python's garbage collector beside a server: its long collections come when few sessions are open.

A full collection walks every object that lives while nothing else runs, 0.1 to 0.4 s with 512 sessions open, and Python
starts one whenever a quarter more have come to live. Here what was loaded before the server is never walked again, and
the rest is when no session is open or many have ended. The young are collected as ever.
"""

import gc

BETWEEN, AT_LATEST = 64, 1024
"""Sessions that end before a full collection: when none is open, and in any case. An episode has two."""
NEVER = 1 << 30


class Collector:
    """`with Collector() as collector`, then `collector.ended(...)` for each session."""

    def __enter__(self) -> "Collector":
        self._ended, self._threshold = 0, gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*self._threshold[:2], NEVER)
        return self

    def __exit__(self, *_: object) -> None:
        gc.set_threshold(*self._threshold)

    def ended(self, still_open: int) -> None:
        """A session is over; `still_open`: how many are not."""
        self._ended += 1
        if self._ended >= (AT_LATEST if still_open else BETWEEN):
            gc.collect()
            self._ended = 0
