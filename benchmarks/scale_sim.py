"""What a rollout costs the driver when 100, 1,000 and 10,000 of them run at once, against a simulated engine.

    python benchmarks/scale_sim.py [--sizes 100 1000 10000] [--tokens 16]

Ray, producer, runner pool, runner and watchdog are the real ones, wired as `molt rl` wires them: one engine, one
runner. The engine answers the same after a random delay, the agent is an `Env` of two turns that does nothing. There is
no trainer: the learner takes a batch and closes it. A group is one rollout, since the driver's work is per group.

A training batch is a quarter of what runs at once, and the queue lets twice of that be open. Each size lasts for three
times what runs at once, or 3,000 rollouts. Delays grow with the size, so that about as many rollouts end in a second at
every size and what passes with time alone weighs the same. CPU is in milliseconds per rollout:

    driver      its process, Ray's threads in it included; `loop` is the thread of the event loop alone
    runner, engine, Ray     the other processes; Ray: its servers

    waiting     the most rollouts that waited for the engine at once
    longest     callback of the driver's event loop, ms of CPU of its thread, garbage collections included. Full ones
                are too rare to be in it (`molt/rare_gc.py`)
    memory      KiB that the driver holds at most beyond what it had before the first rollout, per rollout that runs.
                At the smallest size some of it fits into what warming up left

Bars: `misses`. Fails if one is missed. Last line: `scale_sim ratio=DRIVER/DRIVER`, the largest size over the smallest.
About 5 minutes on two cores.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import ray
from _common import timed_callbacks

from molt import cluster
from molt.cli.args import parse
from molt.columns import token_columns
from molt.config import RLConfig
from molt.data.mixture import EpochOrder
from molt.data.prompts import PromptDataset, PromptStream
from molt.data.rows import load_rows
from molt.rollout.engine_worker import EngineSettings, Sampling
from molt.rollout.producer import Producer
from molt.rollout.shutdown import Shutdown
from molt.rollout.watchdog import Watchdog
from molt.spec import resolve_evaluation
from molt.types import Media, Turn
from tests.tiny import save_tiny

TURNS = 2
TOKENS = 16
"""Generated tokens of a rollout, unless `--tokens` says otherwise. 16,000 are arrays of 200 KB."""
ROOM = 496
"""Tokens of a context besides those."""
ROWS = 100
SAMPLE_S = 0.2
RATE = 150.0
"""Rollouts that end in a second: below what two cores can do."""
MIN_ROLLOUTS = 3_000
TIMES = 3
BATCHES = 4
"""Rollouts of a size: at least, and as a multiple of what runs at once; training batches in what runs at once."""
MAX_RATIO = 1.3
MAX_GROWTH = 1.3
MAX_CALLBACK_MS = 100.0
MIN_SHARE = 0.9

AGENT = f"""
from molt.agents import Env, Result, StepEnvRunner

class Turns(Env):
    async def step(self, state):
        return Result(1.0, "go on", terminated=state["turn"] == {TURNS - 1})

class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Turns)
"""


class SimulatedEngine:
    """As much of the Engine Protocol as rollouts need; one turn is like the other."""

    def __init__(self, settings: EngineSettings):
        self.mean_s = 0.0
        self.waiting = 0
        self.most = 0
        tokens = (settings.max_model_len - ROOM) // TURNS
        self.sampled = token_columns(np.arange(tokens) % 80 + 10, np.zeros(tokens), np.full(tokens, -0.5))

    async def start(self) -> None: ...

    async def resume(self) -> None: ...

    async def alive(self) -> bool:
        return True

    async def pace(self, mean_s: float) -> int:
        """From now on answer after about `mean_s`. The most requests that waited at once under the pace before."""
        most, self.mean_s, self.most = self.most, mean_s, 0
        return most

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: Sampling, media: Sequence[Media] = ()
    ) -> Turn:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(self.mean_s * random.Random(sampling.seed).uniform(0.5, 1.5))
        self.waiting -= 1
        return Turn(np.asarray(prompt_ids, np.int32), self.sampled, "stop")


SimulatedEngineWorker = ray.remote(max_concurrency=16384)(SimulatedEngine)


@dataclass(frozen=True)
class Measured:
    """One size. CPU in milliseconds per rollout."""

    size: int
    rollouts: int
    seconds: float
    cpu: dict[str, float]
    longest_ms: float
    held: float
    """Bytes per rollout that runs at once."""
    waiting: int
    """The most rollouts that waited for the engine at once."""


def prepare(folder: Path, tokens: int) -> RLConfig:
    (folder / "agent.py").write_text(AGENT)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"input": f"say {i}"}) + "\n" for i in range(ROWS)))
    flags = {
        "actor.model_name_or_path": save_tiny(folder / "model"),
        "data.max_len": ROOM + tokens,
        "eval.dataset": folder / "prompts.jsonl",
        "train.agent_path": folder / "agent.py",
        "train.watchdog_s": 240,
        "ckpt.output_dir": folder / "out",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return parse(RLConfig, [*words, "--data.apply_chat_template", "--eval.eval_only"], prog="scale_sim")


def cpu_s() -> dict[str, float]:
    """Seconds of CPU so far, by process."""
    spent = {"driver": time.process_time(), "loop": time.thread_time(), "runner": 0.0, "engine": 0.0, "Ray": 0.0}
    for process in psutil.Process().children(recursive=True):
        title = " ".join(process.cmdline())
        times = process.cpu_times()
        name = "runner" if "RunnerWorker" in title else "engine" if SimulatedEngine.__name__ in title else "Ray"
        spent[name] += times.user + times.system
    return spent


@asynccontextmanager
async def peak_memory() -> AsyncIterator[list[int]]:
    """The list holds the most bytes that this process had."""
    process = psutil.Process()
    peak = [0]

    async def sample() -> None:
        while True:
            peak[0] = max(peak[0], process.memory_info().rss)
            await asyncio.sleep(SAMPLE_S)

    sampling = asyncio.create_task(sample())
    yield peak
    sampling.cancel()


async def learn(producer: Producer, batch_size: int) -> int:
    """All batches; the number of their groups."""
    trained = 0
    while groups := await producer.batch(batch_size, stalled_after_s=producer.runners.patience_s):
        producer.close(groups, producer.step + 1)
        producer.take_metrics()
        trained += len(groups)
    return trained


def show_event(kind: str, /, **fields) -> None:
    print(kind, fields)


def producer_of(config: RLConfig, processes: cluster.Cluster, size: int, rollouts: int) -> Producer:
    """Over a stream of `rollouts` prompts, `size` of them in flight."""
    rows = load_rows(config.eval.dataset, flag="eval.dataset")
    order = EpochOrder(rows.sizes, seed=config.train.seed)
    stream = PromptStream(PromptDataset(rows, config.data), order, num_episodes=rollouts // ROWS)
    queue = 2 * BATCHES - 1
    return Producer(
        stream,
        processes.runners,
        replace(config.rollout, batch_size=size // BATCHES, vllm_generate_batch_size=size),
        Shutdown(),
        queue=queue,
        max_staleness=queue,
        on_event=show_event,
    )


async def measure(config: RLConfig, processes: cluster.Cluster, size: int, rollouts: int, base: int = 0) -> Measured:
    """base: bytes that the driver held before the first rollout."""
    engine = processes.engines.engines[0]
    await engine.pace.remote(size / RATE / TURNS)
    producer = producer_of(config, processes, size, rollouts)
    watchdog = Watchdog(processes.runners, config.train.watchdog_s, producer.on_event, lambda: False)
    before = cpu_s()
    began = time.perf_counter()
    with timed_callbacks() as callbacks:
        async with peak_memory() as peak, asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(task) for task in (watchdog.run(), processes.engines.watch())]
            tasks.create_task(producer.run())
            trained = await learn(producer, producer.config.batch_size)
            for task in watching:
                task.cancel()
    seconds = time.perf_counter() - began
    after = cpu_s()
    assert trained == rollouts, f"{trained} of {rollouts} rollouts were trained"
    cpu = {name: 1e3 * (after[name] - before[name]) / rollouts for name in before}
    waiting = await engine.pace.remote(0.0)
    return Measured(size, rollouts, seconds, cpu, max(callbacks), (peak[0] - base) / size, waiting)


async def measure_all(config: RLConfig, sizes: Sequence[int]) -> list[Measured]:
    """Every size, smallest first; shows each as it comes."""
    async with cluster.started(resolve_evaluation(config).processes, show_event, SimulatedEngineWorker) as processes:
        await measure(config, processes, ROWS, 5 * ROWS)  # warms up
        gc.collect()
        base = psutil.Process().memory_info().rss
        found = []
        print(f"{'at once':>8}{'waiting':>8}{'rollouts':>9}{'a second':>9}", end="")
        print(*(f"{name:>8}" for name in cpu_s()), f"{'longest':>9}{'memory':>8}", sep="", flush=True)
        for size in sorted(sizes):
            found.append(await measure(config, processes, size, max(MIN_ROLLOUTS, TIMES * size), base))
            show(found[-1])
        return found


def show(found: Measured) -> None:
    cpu = "".join(f"{value:8.2f}" for value in found.cpu.values())
    rate = found.rollouts / found.seconds
    held = found.held / 1024
    print(f"{found.size:8,}{found.waiting:8,}{found.rollouts:9,}{rate:9.0f}", end="")
    print(f"{cpu}{found.longest_ms:9.1f}{held:8.1f}", flush=True)


def ratio(found: Sequence[Measured]) -> float:
    return found[-1].cpu["driver"] / found[0].cpu["driver"]


def misses(found: Sequence[Measured]) -> list[str]:
    """What is not as it is asked for."""
    grown = found[-1].held / found[-2].held
    longest = max(size.longest_ms for size in found)
    alone = [size.size for size in found if size.waiting < MIN_SHARE * size.size]
    bars = {
        f"driver CPU per rollout: {ratio(found):.2f} times that of the smallest size": ratio(found) <= MAX_RATIO,
        f"memory per rollout: {grown:.2f} times that of the size before": grown <= MAX_GROWTH,
        f"a callback of {longest:.0f} ms": longest <= MAX_CALLBACK_MS,
        f"fewer than {MIN_SHARE:.0%} waited at once at {alone}": not alone,
    }
    return [said for said, kept in bars.items() if not kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[100, 1_000, 10_000], help="two or more, multiples of 100"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, help="generated tokens of a rollout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = prepare(Path(folder), options.tokens)
        os.environ["RAY_ADDRESS"] = "local"  # `cpu_s` looks at this process and its children
        cluster.start_ray(config)
        try:
            found = asyncio.run(measure_all(config, options.sizes))
        finally:
            ray.shutdown()
    missed = misses(found)
    for said in missed:
        print(f"missed: {said}")
    print(f"scale_sim ratio={ratio(found):.2f}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
