"""What the benchmarks share. The tests' tiny models and tokenizers serve here too."""

import statistics
import sys
import time
from asyncio.events import Handle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`MEDIAN (MIN to MAX)`."""
    middle, low, high = (f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


@contextmanager
def timed_callbacks() -> Iterator[list[float]]:
    """Fills the list with the milliseconds of CPU that each callback of the event loop takes of its thread."""
    run = Handle._run
    spent = []

    def timed(handle: Handle) -> None:
        began = time.thread_time()
        run(handle)
        spent.append(1e3 * (time.thread_time() - began))

    Handle._run = timed
    try:
        yield spent
    finally:
        Handle._run = run
