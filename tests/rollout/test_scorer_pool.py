"""The processes of scorers: what misbehaves costs its own score, in time and by name."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from molt.agents import Trajectory
from molt.errors import AgentError
from molt.rollout import scorer_pool
from molt.rollout.scorer_pool import ScorerPool, child_environment, default_size, inspect_scorer
from molt.types import InfraFailure

pytestmark = pytest.mark.processes
TIMEOUT_S = 2.0
LATE_S = 3.0
"""What a busy machine may add to a deadline."""
MIB = 1 << 20

SYNC = """
import os, sys, time
from decimal import Decimal
from molt.agents import PolicyFailure, Result
from molt.types import InfraFailure

kept = []

def score(trajectory):
    what = trajectory.label
    print("this is no frame")
    if what == "power":
        return 88**77**6
    if what == "hang":
        time.sleep(60)
    if what == "exit":
        os._exit(3)
    if what == "sys.exit":
        sys.exit("bye")
    if what == "leak":
        for _ in range(100):
            kept.append(bytearray(16 << 20))
            time.sleep(0.02)
    if what == "grow":
        kept.append(bytearray(16 << 20))
    if what == "raise":
        raise KeyError("grader")
    if what == "nan":
        return float("nan")
    if what == "text":
        return "1.0"
    if what == "reject":
        raise PolicyFailure(-0.5, "unreadable")
    if what == "sandbox":
        raise InfraFailure("sandbox", "no answer")
    if what == "result":
        return Result(0.25, score=1.0, info={"length": Decimal(3), "note": "fine"})
    if what == "pid" or what == "grow":
        return os.getpid()
    if what == "secret":
        return "A_TOKEN" in os.environ
    return len(trajectory.answer)
"""

ASYNC = """
import asyncio, os

async def score(trajectory):
    what = trajectory.label
    if what == "power":
        return 88**77**6
    if what == "exit":
        await asyncio.sleep(0.3)
        os._exit(3)
    if what == "hang":
        await asyncio.sleep(60)
    await asyncio.sleep(0.5)
    return os.getpid()
"""


def given(label):
    """The trajectory of a prompt with this label, as JSON."""
    branches = [[{"role": "assistant", "content": "four"}]]
    return Trajectory("p", label, "s", None, branches, 1, 1, 1, 2, None, {}, 0.0, 0.0).to_json()


@pytest.fixture
def scorer(tmp_path):
    """`scorer(source)`: the path of a scorer file."""

    def write(source):
        path = tmp_path / "scorer.py"
        path.write_text(source)
        return str(path)

    return write


def run(path, main, *, size=1, timeout_s=TIMEOUT_S, within_s=60.0):
    """The value of `main(pool)`."""

    async def with_pool():
        pool = ScorerPool(path, size, timeout_s)
        try:
            async with asyncio.timeout(within_s):
                return await main(pool)
        finally:
            await pool.close()

    return asyncio.run(with_pool())


async def outcome(pool, label):
    """The reward, or the reason of the failure."""
    try:
        return (await pool.call(given(label)))["reward"]
    except InfraFailure as failure:
        return failure.reason


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("label", "reason", "detail"),
    [
        ("power", "scorer_timeout", "did not return within reward.scorer_timeout_s (=2)"),
        ("hang", "scorer_timeout", "did not return within"),
        ("exit", "scorer_exit", "ended its process with exit code 3"),
        ("sys.exit", "scorer_exit", "SystemExit: bye at "),
        ("leak", "scorer_memory", "took more than 200 MiB beyond what"),
        ("raise", "scorer_KeyError", "KeyError: 'grader' at "),
        ("nan", "reward_not_finite", "reward nan"),
        ("text", "scorer_result", "returned '1.0', a str. Return a number"),
        ("sandbox", "sandbox", "no answer"),
    ],
)
def test_what_goes_wrong_costs_that_score_only(scorer, monkeypatch, label, reason, detail):
    monkeypatch.setattr(scorer_pool, "KILL_BYTES", 200 * MIB)
    monkeypatch.setattr(scorer_pool, "RETIRE_BYTES", 200 * MIB)

    async def main(pool):
        await pool.facts()
        others = [asyncio.create_task(outcome(pool, "good")) for _ in range(2)]
        began = time.monotonic()
        with pytest.raises(InfraFailure) as caught:
            await pool.call(given(label))
        took_s = time.monotonic() - began
        assert caught.value.reason == reason and detail in caught.value.detail
        assert took_s < TIMEOUT_S + LATE_S
        assert await asyncio.gather(*others) == [4, 4]  # len("four")
        assert await outcome(pool, "good") == 4

    run(scorer(SYNC), main)


def test_a_killed_process_is_gone_and_so_is_what_it_started(scorer, tmp_path):
    source = f"""
import subprocess, time
def score(trajectory):
    child = subprocess.Popen(["sleep", "60"])
    open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
    return 88**77**6
"""

    async def main(pool):
        assert await outcome(pool, "") == "scorer_timeout"

    run(scorer(source), main)
    started = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + LATE_S
    while not gone(started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(started)


def test_scores_results_and_rejections(scorer):
    async def main(pool):
        plain = await pool.call(given("good"))
        assert (plain["reward"], plain["score"], plain["info"]) == (4.0, 4.0, {})
        full = await pool.call(given("result"))
        assert (full["reward"], full["score"], full["info"]) == (0.25, 1.0, {"length": 3.0})
        rejected = await pool.call(given("reject"))
        assert (rejected["reward"], rejected["reason"]) == (-0.5, "unreadable")

    run(scorer(SYNC), main)


def test_synchronous_calls_take_turns_in_as_many_processes_as_there_may_be(scorer):
    source = "import os, time\ndef score(trajectory):\n    time.sleep(0.3)\n    return os.getpid()\n"

    async def main(pool):
        pids = await asyncio.gather(*(outcome(pool, str(number)) for number in range(6)))
        assert len(set(pids)) == 2 and len(pool.processes) == 2

    run(scorer(source), main, size=2)


def test_a_process_that_grows_is_replaced_between_two_calls(scorer, monkeypatch):
    monkeypatch.setattr(scorer_pool, "RETIRE_BYTES", 40 * MIB)

    async def main(pool):
        pids = [await outcome(pool, "grow") for _ in range(6)]
        # 16 MiB a call: the third one is the first beyond 40.
        assert pids[0] == pids[1] == pids[2] != pids[3] == pids[4] == pids[5]

    run(scorer(SYNC), main)


def test_a_process_is_replaced_after_so_many_calls(scorer, monkeypatch):
    monkeypatch.setattr(scorer_pool, "MOST_CALLS", 2)

    async def main(pool):
        pids = [await outcome(pool, "pid") for _ in range(4)]
        assert pids[0] == pids[1] != pids[2] == pids[3]

    run(scorer(SYNC), main)


def test_a_call_that_nobody_waits_for_does_not_hold_its_process(scorer):
    async def main(pool):
        await pool.facts()
        call = asyncio.create_task(pool.call(given("hang")))
        await asyncio.sleep(0.2)
        call.cancel()
        assert await outcome(pool, "good") == 4

    run(scorer(SYNC), main, timeout_s=50.0, within_s=20.0)


def test_async_calls_overlap_in_one_process(scorer):
    async def main(pool):
        await pool.facts()
        began = time.monotonic()
        pids = await asyncio.gather(*(outcome(pool, "") for _ in range(12)))
        assert len(set(pids)) == 1 and time.monotonic() - began < 12 * 0.5 / 2

    run(scorer(ASYNC), main)


def test_an_async_call_that_hangs_is_cancelled_alone(scorer):
    async def main(pool):
        await pool.facts()
        hanging = asyncio.create_task(outcome(pool, "hang"))
        await asyncio.sleep(TIMEOUT_S - 0.3)
        other = asyncio.create_task(outcome(pool, ""))  # under way when the deadline of the first passes
        before = pool.processes[0].pid
        assert await hanging == "scorer_timeout" and await other == before == await outcome(pool, "")

    run(scorer(ASYNC), main)


@pytest.mark.parametrize(("label", "reason"), [("exit", "scorer_exit"), ("power", "scorer_timeout")])
def test_calls_that_shared_a_process_are_repeated_uncounted(scorer, label, reason):
    async def main(pool):
        await pool.facts()
        labels = ["", "", label, ""]
        answers = await asyncio.gather(*(outcome(pool, each) for each in labels))
        assert answers[2] == reason and all(isinstance(answers[index], float) for index in (0, 1, 3))
        assert isinstance(await outcome(pool, ""), float)

    run(scorer(ASYNC), main, timeout_s=1.5)


def test_a_judge_is_given_to_a_scorer_that_asks_for_one(scorer):
    source = "def score(trajectory, judge_url):\n    return len(judge_url)\n"

    async def main(pool):
        assert (await pool.facts()).wants_judge
        assert (await pool.call(given(""), "http://judge"))["reward"] == 12

    run(scorer(source), main)


def test_no_secret_is_in_the_environment(scorer, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "secret")
    monkeypatch.setenv("LC_TIME", "C")
    assert "A_TOKEN" not in child_environment() and child_environment()["LC_TIME"] == "C"

    async def main(pool):
        assert await outcome(pool, "secret") == 0

    run(scorer(SYNC), main)


def test_a_process_ends_with_its_runner(scorer, tmp_path):
    path = scorer(SYNC)
    program = f"""
import asyncio
from molt.rollout.scorer_pool import ScorerPool
async def main():
    pool = ScorerPool({path!r}, 1, 600.0)
    await pool.facts()
    call = asyncio.create_task(pool.call({given("power")!r}))
    await asyncio.sleep(0.3)
    print(pool.processes[0].pid, flush=True)
    await call
asyncio.run(main())
"""
    runner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    pid = int(runner.stdout.readline())
    assert psutil.pid_exists(pid)
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()
    deadline = time.monotonic() + LATE_S
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(pid)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def scores(trajectory): ...", "exports no function `score`: no reward can arise. Did you mean 'scores'?"),
        ("def score(a, b): ...", r"`score` takes \(a, b\), but molt gives it a trajectory.*judge_url"),
        ("import nothing_of_the_kind", "cannot be imported: ModuleNotFoundError"),
        ("raise SystemExit(2)", "exits when it is imported"),
        ("import os; os._exit(7)", "ended its process when it was imported with exit code 7"),
    ],
)
def test_a_file_that_is_no_scorer_is_refused(scorer, source, message):
    with pytest.raises(AgentError, match=message):
        asyncio.run(inspect_scorer(scorer(source)))


def test_a_missing_file_names_the_nearest(scorer, tmp_path):
    scorer(SYNC)
    with pytest.raises(AgentError, match=r"is not a file.*Did you mean 'scorer\.py'"):
        asyncio.run(inspect_scorer(str(tmp_path / "scorr.py")))


def test_a_file_that_changed_since_the_run_began_scores_nothing(scorer):
    path = scorer(SYNC)

    async def main(pool):
        Path(path).write_text("def score(trajectory): return 0")
        assert await outcome(pool, "good") == "scorer_changed"

    run(path, main)


def test_the_automatic_number_of_processes(monkeypatch):
    for cores, processes in ((1, 2), (2, 2), (8, 4), (128, 16)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert default_size() == processes
