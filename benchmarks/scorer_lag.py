"""How much later an event loop wakes while scorers compute beside it.

    python benchmarks/scorer_lag.py [--seconds 10] [--repeats 3] [--scorers 2]

A runner's event loop plays simulated model calls: 256 sleepers that each wake every 5 ms and do a little work. Then the
same, while every process of a scorer pool is busy with a synchronous scorer that never yields, `sum(range(...))`, and
new trajectories wait for each. Lag: how much later than requested a sleeper of 10 ms wakes, the 99th percentile, since
that is what a rollout notices.

Last line: `scorer_lag ratio=LAG_WITH/LAG_WITHOUT`. At most 1.5 is asked for.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from _common import spread

from molt.agents.trajectory import Trajectory
from molt.rollout.scorer_pool import ScorerPool
from molt.types import InfraFailure

ROLLOUTS = 256
CALL_S = 0.005
SLEEP_S = 0.01
MAX_RATIO = 1.5
SCORER = """
def score(trajectory):
    return sum(range(30_000_000)) % 2
"""


async def rollout() -> None:
    """Model calls without end, and what a runner does between them."""
    while True:
        await asyncio.sleep(CALL_S)
        sum(range(200))


async def lag_s(seconds: float) -> float:
    """The 99th percentile of the lag of the loop, which plays rollouts meanwhile."""
    rollouts = [asyncio.create_task(rollout()) for _ in range(ROLLOUTS)]
    lags = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        await asyncio.sleep(SLEEP_S)
        lags.append(time.monotonic() - began - SLEEP_S)
    for task in rollouts:
        task.cancel()
    return statistics.quantiles(lags, n=100)[-1]


async def keep_busy(pool: ScorerPool, number: int) -> None:
    """One score after another."""
    messages = [{"role": "user", "content": "x" * 4000}, {"role": "assistant", "content": "y" * 4000}]
    trajectory = Trajectory("x", number, "s", None, [messages], 1, 1000, 1000, 2000, None, {}, 0.0, 0.0)
    while True:
        with suppress(InfraFailure):
            await pool.call(trajectory.to_json())


async def measure(seconds: float, repeats: int, scorers: int) -> tuple[list[float], list[float]]:
    """Lags without and with scorers, in turn, so that another load of the machine falls on both."""
    without, with_scorers = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scorer.py"
        path.write_text(SCORER)
        pool = ScorerPool(str(path), scorers, timeout_s=60.0)
        try:
            await pool.facts()
            for _ in range(repeats):
                without.append(await lag_s(seconds))
                calls = [asyncio.create_task(keep_busy(pool, number)) for number in range(2 * scorers)]
                await asyncio.sleep(0.5)
                with_scorers.append(await lag_s(seconds))
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await pool.close()
    return without, with_scorers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scorers", type=int, default=2)
    arguments = parser.parse_args()
    without, with_scorers = asyncio.run(measure(arguments.seconds, arguments.repeats, arguments.scorers))
    print(f"without scorers: {spread([1e3 * value for value in without])} ms late, 99th percentile")
    print(f"with {arguments.scorers} busy scorers: {spread([1e3 * value for value in with_scorers])} ms late")
    ratio = statistics.median(with_scorers) / statistics.median(without)
    if ratio > MAX_RATIO:
        print(f"above {MAX_RATIO}: scorers slow the rollouts of their runner down")
    print(f"scorer_lag ratio={ratio:.2f}")


if __name__ == "__main__":
    main()
