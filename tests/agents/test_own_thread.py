"""The thread of an episode: one for all its calls, left behind by a call that does not end."""

import asyncio
import contextvars
import threading

import pytest

from molt.agents.own_thread import OwnThread

NAME = contextvars.ContextVar("name")


def test_all_calls_run_in_one_thread_that_is_not_the_loops():
    """Objects of sqlite3, or of a browser, may be used in the thread alone that made them."""

    async def main():
        thread = OwnThread("mine")
        idents = {await thread.call(threading.get_ident) for _ in range(3)}
        thread.end()
        return idents

    idents = asyncio.run(main())
    assert len(idents) == 1 and threading.get_ident() not in idents


def test_what_a_function_raises_is_raised_here():
    async def main():
        thread = OwnThread("mine")
        with pytest.raises(KeyError):
            await thread.call({}.__getitem__, "x")
        with pytest.raises(SystemExit):
            await thread.call(exec, "raise SystemExit(1)")
        with pytest.raises(RuntimeError, match="StopIteration"):  # which a future cannot hold
            async with asyncio.timeout(5):
                await thread.call(next, iter([]))
        assert await thread.call(str, 1) == "1"
        thread.end()

    asyncio.run(main())


def test_a_call_sees_the_context_of_its_caller():
    async def main():
        thread = OwnThread("mine")
        NAME.set("outer")
        return await thread.call(NAME.get)

    assert asyncio.run(main()) == "outer"


def test_a_call_that_does_not_end_is_left_behind_and_keeps_no_other():
    release = threading.Event()

    async def main():
        thread = OwnThread("mine")
        first = await thread.call(threading.get_ident)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await thread.call(release.wait, 20)
        second = await thread.call(threading.get_ident)
        thread.end()
        assert first != second

    asyncio.run(asyncio.wait_for(main(), 5))
    release.set()


def test_the_threads_end_with_the_episodes():
    async def main():
        before = threading.active_count()
        for _ in range(5):
            thread = OwnThread("mine")
            await thread.call(int)
            thread.end()
        async with asyncio.timeout(5):
            while threading.active_count() > before:
                await asyncio.sleep(0.01)

    asyncio.run(main())
