"""What leaves a user's code: exits and other BaseExceptions are failures, and end no event loop."""

import asyncio
import threading

import anyio
import pytest
import uvloop

from molt.agents.user_errors import contain_tasks, contained, failure_of
from molt.types import InfraFailure


class TimedOut(BaseException):
    """As the time limits of some libraries are."""


async def exits():
    await asyncio.sleep(0)
    raise SystemExit(3)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), TimedOut("2 s")])
def test_what_is_no_exception_is_a_failure_with_the_users_line(error):
    with pytest.raises(InfraFailure) as failure, contained():
        raise error
    assert failure.value.reason == type(error).__name__
    assert failure.value.detail.startswith(f"{error} at " if str(error) else "at ") and __file__ in failure.value.detail


@pytest.mark.parametrize("error", [ValueError("x"), asyncio.CancelledError(), GeneratorExit(), InfraFailure("mine")])
def test_errors_and_the_ends_of_a_coroutine_pass(error):
    with pytest.raises(type(error)) as raised, contained():
        raise error
    assert raised.value is error


def test_the_first_error_of_a_task_group_is_the_failure():
    group = BaseExceptionGroup("both", [ExceptionGroup("inner", [KeyError("a")]), TimedOut()])
    assert (failure_of(group).reason, failure_of(ExceptionGroup("x", [InfraFailure("sandbox")])).reason) == (
        "KeyError",
        "sandbox",
    )


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_no_task_ends_its_loop(new_loop):
    """As in a runner: the loop runs in a thread for ever, and a task that nobody awaits exits."""
    loop = new_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def episode():
        contain_tasks(asyncio.get_running_loop())
        forgotten = asyncio.create_task(exits())
        await asyncio.sleep(0.02)
        assert isinstance(forgotten.exception(), InfraFailure)
        with pytest.raises(ExceptionGroup):  # and no SystemExit
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(exits())
        with pytest.raises(InfraFailure, match="SystemExit"):
            await asyncio.gather(exits(), asyncio.sleep(0))
        return "alive"

    assert asyncio.run_coroutine_threadsafe(episode(), loop).result(10) == "alive"
    assert asyncio.run_coroutine_threadsafe(asyncio.sleep(0, "still"), loop).result(10) == "still"
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def test_a_contained_task_is_cancelled_named_and_has_its_context_as_any_other():
    async def named():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return asyncio.current_task().get_name()

    async def main():
        contain_tasks(asyncio.get_running_loop())
        task = asyncio.create_task(named(), name="mine")
        await asyncio.sleep(0)
        task.cancel()
        assert await task == "mine" and "mine" in repr(task)
        never_started = asyncio.create_task(named())
        never_started.cancel()
        with pytest.raises(asyncio.CancelledError):
            await never_started

    asyncio.run(main())


def test_anyio_whose_cancel_scopes_look_at_coroutines_works_in_contained_tasks():
    """The HTTP clients of OpenAI and Anthropic use it."""

    async def waits():
        with anyio.move_on_after(0.01) as scope:
            await anyio.sleep(60)
        return scope.cancelled_caught

    async def main():
        contain_tasks(asyncio.get_running_loop())
        assert await asyncio.create_task(waits())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 60)
            await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()

    asyncio.run(asyncio.wait_for(main(), 10))
