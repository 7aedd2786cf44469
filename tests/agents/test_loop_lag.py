"""Which line blocks an event loop, seen from another thread; and what a busy machine delays, which is no block."""

import asyncio
import contextlib
import sys
import threading
import time

import pytest

from molt.agents import loop_lag
from molt.agents.loop_lag import Block, BlockReporter, LoopLag, report_from_thread

USERS_FILE = """
import time


def grade(seconds):
    time.sleep(seconds)
"""


@pytest.fixture
def agent(tmp_path):
    """A module in a file of a user, whose line 6 sleeps."""
    file = tmp_path / "agent.py"
    file.write_text(USERS_FILE)
    names = {}
    exec(compile(USERS_FILE, str(file), "exec"), names)
    return file, names["grade"]


async def marking(lag):
    """Start to measure."""
    measuring = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    return measuring


def asked_while(block_loop, lag, after_s):
    """What `blocked` answers 0.2 s after the start of `block_loop` in the loop."""
    answers = []
    asking = threading.Timer(0.2, lambda: answers.append(lag.blocked(after_s)))

    async def main():
        measuring = await marking(lag)
        asking.start()
        block_loop()
        measuring.cancel()

    asyncio.run(main())
    asking.join()
    return answers[0]


def test_the_users_line_is_named_while_it_blocks(agent):
    file, grade = agent
    block = asked_while(lambda: grade(0.5), LoopLag(), 0.1)
    assert block.place == f"{file}:6" and 0.1 < block.seconds < 0.5


def test_a_block_that_is_shorter_is_none(agent):
    assert asked_while(lambda: agent[1](0.5), LoopLag(), 10.0) is None


def test_a_loop_without_work_is_not_blocked():
    """Though its mark is old; the user's lines that started the loop do not count."""

    async def main():
        lag = LoopLag()
        lag._marked()
        return await asyncio.to_thread(lambda: time.sleep(0.3) or lag.blocked(0.1))

    assert asyncio.run(main()) is None


def test_the_thread_ends_with_the_measurement(monkeypatch):
    monkeypatch.setattr(loop_lag, "LOOK_S", 0.05)
    lag = LoopLag()
    reported = []

    async def main():
        measuring = await marking(lag)
        thread = report_from_thread(lag, reported.append, lambda: reported.append("no loop"))
        measuring.cancel()
        return thread

    thread = asyncio.run(main())
    assert lag.ended.is_set() and lag.blocked(0.0) is None
    thread.join(10)
    assert not thread.is_alive() and reported == []


def test_the_time_without_a_core_is_no_block_but_a_lag(agent, monkeypatch):
    """A busy machine: the loop is 0.5 s late, and its thread waited for a core all the time."""
    monkeypatch.setattr(loop_lag, "waited_for_core_s", lambda thread: time.monotonic())
    lag = LoopLag()
    assert asked_while(lambda: agent[1](0.5), lag, 0.1) is None

    async def main():
        measuring = await marking(lag)
        await asyncio.sleep(0.1)
        agent[1](0.5)
        await asyncio.sleep(0.1)
        measuring.cancel()

    asyncio.run(main())
    assert lag.take_s() > 0.3
    assert lag.take_blocked_s() < 0.05
    assert lag.take_s() == 0.0


def test_a_sleeping_thread_does_not_wait_for_a_core():
    """CPU time cannot tell the two apart; the kernel's account can."""
    thread = threading.get_native_id()
    before = loop_lag.waited_for_core_s(thread)
    time.sleep(0.2)
    assert loop_lag.waited_for_core_s(thread) - before < 0.15
    assert loop_lag.waited_for_core_s(2**22 + 1) == 0.0, "a thread that the kernel does not know"


def test_each_line_is_reported_once_in_a_while(monkeypatch):
    blocks = iter([Block("a:1", 6.0), Block("a:1", 7.0), Block("b:2", 6.0), Block("a:1", 8.0)])
    lag = LoopLag()
    monkeypatch.setattr(lag, "blocked", lambda after_s: next(blocks))
    reporter = BlockReporter(lag)
    assert [reporter.look() for _ in range(3)] == [Block("a:1", 6.0), None, Block("b:2", 6.0)]
    monkeypatch.setattr(loop_lag, "QUIET_S", 0.0)
    assert reporter.look() == Block("a:1", 8.0)


def test_the_thread_reports_during_the_block(agent, monkeypatch):
    monkeypatch.setattr(loop_lag, "LOOK_S", 0.05)
    monkeypatch.setattr(loop_lag.BlockReporter.__init__, "__defaults__", (0.2,))
    reported = []

    async def main():
        lag = LoopLag()
        measuring = await marking(lag)
        report_from_thread(lag, reported.append, lambda: None)
        agent[1](1.0)
        during = list(reported)
        measuring.cancel()
        return during

    (block,) = asyncio.run(main())
    assert block.place == f"{agent[0]}:6"


def test_a_delay_that_lasts_is_in_the_worst_seen_from_another_thread(agent):
    """Numbers of a step are asked for while a block lasts, and the block ends later."""
    lag = LoopLag()
    seen = []
    asking = threading.Timer(0.4, lambda: seen.extend([lag.take_s(), lag.take_blocked_s()]))

    async def main():
        measuring = await marking(lag)
        asking.start()
        agent[1](0.6)
        measuring.cancel()

    asyncio.run(main())
    asking.join()
    assert 0.25 < seen[0] < 0.6 and 0.2 < seen[1] < 0.6


def test_a_loop_that_ended_though_it_was_measured_is_told(monkeypatch):
    """Its thread is gone: `sys.exit` in a callback."""
    monkeypatch.setattr(loop_lag, "LOOK_S", 0.05)
    lag = LoopLag()
    told = threading.Event()
    loop = asyncio.new_event_loop()

    def run():
        with contextlib.suppress(SystemExit):
            loop.run_forever()

    thread = threading.Thread(target=run)
    thread.start()
    measuring = asyncio.run_coroutine_threadsafe(lag.run(), loop)
    while lag._mark is None:
        time.sleep(0.01)
    report_from_thread(lag, lambda block: None, told.set)
    assert not told.wait(0.3)
    loop.call_soon_threadsafe(sys.exit)
    assert told.wait(10)
    thread.join(10)
    measuring.cancel()
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
