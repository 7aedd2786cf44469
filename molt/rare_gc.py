"""Python's garbage collector in a process of molt."""

import gc

BETWEEN = 1_000
"""Collections of the middle generation between two full ones."""


def collect_rarely() -> None:
    """Make full collections rare from now on, and never visit again what is loaded already.

    Nothing else runs during one. With thousands of objects of rollouts alive it takes 0.2 to 0.6 s, Python starts one
    whenever the number of objects has grown by a quarter, and it finds next to nothing: trees and groups have no
    cycles. Full collections are also a fifth of the time in which a process imports torch and transformers.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, BETWEEN)
