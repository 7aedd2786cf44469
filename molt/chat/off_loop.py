"""Work off the event loop, in threads that only the chat server uses."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

Args = TypeVarTuple("Args")
R = TypeVar("R")

LIGHT_BYTES = 1 << 15
"""A body that is parsed in well under a millisecond."""
LIGHT_TEXT = 2048
"""Characters that are rendered in well under a millisecond."""
LIGHT_TOKENS = 512
"""Sampled tokens that are read in well under a millisecond."""

_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="molt-chat")
"""Agents with synchronous clients fill the event loop's threads, and would wait for themselves."""


async def aside(function: Callable[[*Args], R], *args: *Args) -> R:
    """`function(*args)` in a thread, off the event loop.

    The way to a thread and back takes longer than light work (`LIGHT_*`), which stays on the loop.
    """
    return await asyncio.get_running_loop().run_in_executor(_THREADS, function, *args)
