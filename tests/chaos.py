"""Runs that lose seven kinds of processes (`KINDS`), each at a random moment.

    python -m tests.chaos [--fake 10] [--vllm 3] [--seed 0] [--steps 40]

Every schedule is one supervised run with all seven kills, compared with one run of the same settings that nothing
happens to. Asks: the run completes, every prompt is trained exactly once, every trained group is whole, the final
pass@1 is that of the undisturbed run. Prints the seconds from each kill to the next step that lasts.
"""

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from statistics import mean

import psutil
import pyarrow.parquet as pq

from molt.cli.supervise import supervise
from molt.report.sinks import read_jsonl
from tests.runs import flags, write_prompts
from tests.tiny import save_tiny

KINDS = {
    "engine": ("ray::FakeEngine", "ray::RolloutEngineWorker", "VLLM::EngineCore"),
    "runner": ("ray::RunnerWorker",),
    "rank": ("ray::PolicyWorker",),
    "keeper": ("ray::KeeperWorker",),
    "scorer": (f"{sys.executable} -m molt.agents.scorer_process",),
    "environment": ("sh -c sleep",),
    "driver": (f"{sys.executable} -m molt rl", f"{sys.executable} -m tests.runs"),
}
GROUP, BATCH = 4, 4
RUN_S, STEP_S = 900.0, 240.0
PASS_AT_1 = 0.05
"""The final pass@1 may differ by so much from that of an undisturbed run."""


def arguments(model: str, output: Path, steps: int, engine: str) -> list[str]:
    prompts = write_prompts(output.with_suffix(".jsonl"), steps * BATCH)
    ranks = {"fake": "2", "vllm": "1"}[engine]
    return flags(
        model, output, prompts,
        "--train.agent_path", str(Path(__file__).parent / "chaos_agent.py"),
        "--reward.scorer", str(Path(__file__).parent / "chaos_scorer.py"),
        "--train.watchdog_s", "20",
        "--rollout.num_runners", "2",
        "--vllm.num_engines", "2",
        "--actor.num_gpus_per_node", ranks,
        "--ckpt.save_steps", "5",
        "--logger.rollouts_per_step", "-1",
        "--eval.dataset", prompts,
    )  # fmt: skip


def family(process: subprocess.Popen, kind: str) -> list[psutil.Process]:
    """The living descendants of the kind."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if " ".join(child.cmdline()).startswith(KINDS[kind]):
                found.append(child)
        except psutil.Error:
            continue
    return found


def steps_of(output: Path) -> list[dict]:
    return [line for line in read_jsonl(output / "run" / "metrics.jsonl") if "train/loss" in line]


def wait(process: subprocess.Popen, condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"no progress within {seconds:.0f} s (exit code {process.poll()})")
        time.sleep(0.05)


def disturb(process: subprocess.Popen, output: Path, schedule: list[tuple[int, float, str]], rng: random.Random):
    """SIGKILL, when so many steps are trained and after so many seconds, one of the kind; the times, by kind."""
    killed = []
    for step, delay, kind in schedule:
        wait(process, lambda step=step: len(steps_of(output)) >= step, STEP_S)
        time.sleep(delay)
        wait(process, lambda kind=kind: kill_one(family(process, kind), rng), STEP_S)
        killed.append((kind, time.time()))
    return killed


def kill_one(victims: list[psutil.Process], rng: random.Random) -> bool:
    """Whether there was one, and it had not ended by itself."""
    try:
        os.kill(rng.choice(victims).pid, signal.SIGKILL)
        return True
    except (IndexError, ProcessLookupError):
        return False


def run(model: str, output: Path, engine: str, steps: int, seed: int | None) -> tuple[float, dict[str, float]]:
    """One supervised run, disturbed if there is a seed: its final pass@1, and the seconds of each recovery."""
    module = {"fake": "tests.runs", "vllm": "molt rl"}[engine]
    command = [sys.executable, "-m", "tests.chaos", "--supervise", module, *arguments(model, output, steps, engine)]
    log = output.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        killed = []
        if seed is not None:
            rng = random.Random(seed)
            schedule = sorted((rng.randint(2, steps - 4), rng.uniform(0, 1), kind) for kind in KINDS)
            killed = disturb(process, output, schedule, rng)
        assert process.wait(timeout=RUN_S) == 0, "the run failed"
        check(output, steps)
    except (AssertionError, subprocess.TimeoutExpired):
        print(log.read_text()[-5000:], file=sys.stderr)
        raise
    finally:
        process.kill()
    ends = [line["time"] for line in steps_of(output)]
    recovery = {kind: min((end - at for end in ends if end > at), default=math.nan) for kind, at in killed}
    scores = [line["eval/" + output.stem + "/pass1"] for line in read_jsonl(output / "run" / "metrics.jsonl")
              if f"eval/{output.stem}/pass1" in line]  # fmt: skip
    return scores[-1], recovery


def check(output: Path, steps: int) -> None:
    """Every prompt trained exactly once, in whole groups, and nothing that has no reward."""
    assert [line["step"] for line in steps_of(output)] == list(range(1, steps + 1))
    trained: Counter[str] = Counter()
    for path in sorted((output / "run" / "rollouts").glob("step_*.parquet")):
        rows = pq.read_table(path, columns=["group_id", "rollout", "reward"]).to_pylist()
        groups = defaultdict(list)
        for row in rows:
            groups[row["group_id"]].append(row["rollout"])
            assert math.isfinite(row["reward"])
        assert all(sorted(rollouts) == list(range(GROUP)) for rollouts in groups.values()), "a group is not whole"
        trained.update(groups.keys())
    assert trained == Counter(f"0:{i}" for i in range(steps * BATCH)), "a prompt was lost or trained twice"


def schedules(engine: str, count: int, steps: int, seed: int, folder: Path) -> list[dict[str, float]]:
    model = str(save_tiny(folder / f"model_{engine}"))
    plain, _ = run(model, folder / f"{engine}_plain", engine, steps, None)
    recoveries = []
    for number in range(seed, seed + count):
        began = time.monotonic()
        score, recovery = run(model, folder / f"{engine}_{number}", engine, steps, number)
        assert abs(score - plain) <= PASS_AT_1, f"pass@1 {score:.3f}, {plain:.3f} without chaos"
        seconds = "  ".join(f"{kind} {seconds:.1f} s" for kind, seconds in recovery.items())
        print(f"{engine} schedule {number}: whole, pass@1 {score:.3f} ({plain:.3f} undisturbed), "
              f"{time.monotonic() - began:.0f} s; recovery {seconds}", flush=True)  # fmt: skip
        recoveries.append(recovery)
    return recoveries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", type=int, default=10, help="schedules with the fake engine")
    parser.add_argument("--vllm", type=int, default=3, help="schedules with vLLM")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for engine, count in (("fake", options.fake), ("vllm", options.vllm)):
            if not count:
                continue
            recoveries = schedules(engine, count, options.steps, options.seed, Path(name))
            print(f"{engine}: seconds from a kill to the next step that lasts, mean and worst")
            for kind in KINDS:
                seconds = [recovery[kind] for recovery in recoveries if kind in recovery]
                print(f"  {kind:12} {mean(seconds):6.1f} {max(seconds):6.1f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--supervise"]:
        sys.exit(supervise(sys.argv[3:], sys.argv[2]))
    main()
