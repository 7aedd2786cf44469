"""How late the event loop of a runner wakes while scorers compute beside it.

    python benchmarks/scorer_lag.py [--seconds 10] [--repeats 5] [--scorers 2]

The loop plays 64 simulated rollouts: each waits 0.2 to 0.4 s for a model call, then takes 1 ms of the loop, as for a
template and a tokenizer. Then the same while every process of a scorer pool is busy with a synchronous scorer that
never yields, and as many trajectories wait. Lag: the worst in a second, as `perf/runner_lag_max` has it (`LoopLag`);
the median of these seconds. Seconds with and without scorers take turns: another load of the machine falls on both.

Last line: `scorer_lag ratio=LAG_WITH/LAG_WITHOUT`. At most 1.5 is asked for.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from _common import spread

from molt.agents.trajectory import Trajectory
from molt.rollout.scorer_pool import ScorerPool
from molt.rollout.watchdog import LoopLag
from molt.types import InfraFailure

ROLLOUTS = 64
SHORTEST_CALL_S = 0.2
LONGEST_CALL_S = 0.4
WORK_S = 0.001
"""CPU time of the loop between two model calls of a rollout."""
MAX_RATIO = 1.5
SCORER = """
def score(trajectory):
    return sum(range(30_000_000)) % 2
"""


async def rollout(seed: int) -> None:
    """Model calls without end, and what a runner does between them."""
    chance = random.Random(seed)
    while True:
        await asyncio.sleep(chance.uniform(SHORTEST_CALL_S, LONGEST_CALL_S))
        end = time.thread_time() + WORK_S
        while time.thread_time() < end:
            pass


@asynccontextmanager
async def playing() -> AsyncIterator[LoopLag]:
    """Rollouts while the block runs, and the lag of the loop."""
    lag = LoopLag()
    tasks = [asyncio.create_task(lag.run())]
    tasks += [asyncio.create_task(rollout(seed)) for seed in range(ROLLOUTS)]
    try:
        yield lag
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def scoring(pool: ScorerPool) -> AsyncIterator[None]:
    """All processes of the pool are busy while the block runs, and as many trajectories wait."""
    calls = [asyncio.create_task(keep_busy(pool, number)) for number in range(2 * pool.size)]
    try:
        while len(pool.processes) < pool.size:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        yield
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def keep_busy(pool: ScorerPool, number: int) -> None:
    """One score after another."""
    messages = [{"role": "user", "content": "x" * 4000}, {"role": "assistant", "content": "y" * 4000}]
    trajectory = Trajectory("x", number, "s", None, [messages], 1, 1000, 1000, 2000, None, {}, 0.0, 0.0)
    while True:
        with suppress(InfraFailure):
            await pool.call(trajectory.to_json())


async def worst_lags_s(lag: LoopLag, seconds: int) -> list[float]:
    """The worst lag of each second."""
    lag.take_s()
    lags = []
    for _ in range(seconds):
        await asyncio.sleep(1.0)
        lags.append(lag.take_s())
    return lags


async def measure(seconds: int, repeats: int, scorers: int) -> tuple[list[float], list[float]]:
    """The worst lags of seconds without and with scorers."""
    without: list[float] = []
    with_scorers: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scorer.py"
        path.write_text(SCORER)
        pool = ScorerPool(str(path), scorers, timeout_s=60.0)
        try:
            async with playing() as lag:
                for _ in range(repeats):
                    without += await worst_lags_s(lag, seconds)
                    async with scoring(pool):
                        with_scorers += await worst_lags_s(lag, seconds)
                    await asyncio.sleep(1.0)
        finally:
            await pool.close()
    return without, with_scorers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scorers", type=int, default=2)
    arguments = parser.parse_args()
    without, with_scorers = asyncio.run(measure(arguments.seconds, arguments.repeats, arguments.scorers))
    print(f"without scorers: {spread([1e3 * value for value in without])} ms late, the worst of a second")
    print(f"with {arguments.scorers} busy scorers: {spread([1e3 * value for value in with_scorers])} ms late")
    ratio = statistics.median(with_scorers) / statistics.median(without)
    if ratio > MAX_RATIO:
        print(f"above {MAX_RATIO}: scorers slow the rollouts of their runner down")
    print(f"scorer_lag ratio={ratio:.2f}")


if __name__ == "__main__":
    main()
