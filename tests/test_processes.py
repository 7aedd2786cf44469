"""Whole processes: signals, SIGKILL, orphans. Real Ray; the orphan test has the real vLLM."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.runs import events, flags, metrics, trained_groups, write_prompts

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parent.parent


def start(module: str, arguments: list[str], log: Path) -> subprocess.Popen:
    with log.open("w") as file:
        return subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT, stdout=file, stderr=file)


def wait_for(condition, what: str, log: Path, timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s:\n{log.read_text()[-3000:]}"
        time.sleep(0.1)


def steps_done(output: Path) -> int:
    return len(metrics(output, "train/loss")) if (output / "run" / "metrics.jsonl").exists() else 0


def test_sigterm_finishes_the_step_saves_and_exits_0_and_the_run_resumes(model_dir, tmp_path):
    output, log = tmp_path / "out", tmp_path / "log"
    arguments = flags(model_dir, output, write_prompts(tmp_path / "p.jsonl", 80))
    driver = start("tests.runs", arguments, log)
    try:
        wait_for(lambda: steps_done(output) >= 3, "third step", log)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(timeout=240) == 0, log.read_text()[-3000:]
    finally:
        driver.kill()
    done = steps_done(output)
    assert 3 <= done < 20
    assert events(output, "checkpoint")[-1]["step"] == done
    again = subprocess.run(
        [sys.executable, "-m", "tests.runs", *arguments, "--ckpt.load_enable"], cwd=ROOT, timeout=400
    )
    assert again.returncode == 0
    assert sorted(trained_groups(output)) == sorted(f"0:{i}" for i in range(80))


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.vllm
def test_no_process_outlives_a_killed_driver(model_dir, tmp_path):
    """SIGKILL, so nobody can clean up: Ray's processes, the ranks, vLLM's engine core must notice by themselves."""
    output, log = tmp_path / "out", tmp_path / "log"
    arguments = flags(model_dir, output, write_prompts(tmp_path / "p.jsonl", 400), "--rollout.max_new_tokens", "16")
    driver = start("molt.cli.train_rl_ray", arguments, log)
    family: list[psutil.Process] = []
    try:
        wait_for(lambda: steps_done(output) >= 1, "first step", log, timeout_s=240)
        family = descendants(driver.pid)
        engine = next(p for p in family if "RolloutEngineWorker" in " ".join(p.cmdline()))
        assert engine.children(), "vLLM's engine core is a process of its own: it is the one that would be left behind"
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        killed = time.monotonic()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, f"still alive after {time.monotonic() - killed:.1f} s: {[p.cmdline()[:2] for p in alive]}"
    finally:
        driver.kill()
        for process in family:
            if process.is_running():
                process.kill()
