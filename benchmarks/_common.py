"""What the benchmarks share. The tests' tiny models and tokenizers serve here too."""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`MEDIAN (MIN to MAX)`."""
    middle, low, high = (f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"
