"""What a killed driver leaves behind is ended and removed. Real processes."""

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from molt import guard

SHM = Path("/dev/shm")
GRANDCHILD = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder = pathlib.Path(f"/dev/shm/molt-weights-{os.getpid()}-test")
folder.mkdir()
(folder / "weights.safetensors").write_bytes(bytes(1000))
print(os.getpid(), flush=True)
time.sleep(60)
"""
DRIVER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(60)"


def gone(pid: int) -> bool:
    """A zombie is gone: only its parent, not the guard, can remove its entry."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.skipif(not SHM.is_dir(), reason="no /dev/shm")
def test_a_rank_that_outlives_its_driver_is_ended_and_its_weights_are_removed(monkeypatch):
    monkeypatch.setattr(guard, "POLL_S", 0.1)
    monkeypatch.setattr(guard, "GRACE_S", 0.3)
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, GRANDCHILD], stdout=subprocess.PIPE, text=True)
    rank = int(driver.stdout.readline())
    folder, foreign = (SHM / f"molt-weights-{name}-test" for name in (rank, f"{rank}0"))
    foreign.mkdir()
    try:
        watching = threading.Thread(target=guard.watch, args=(driver.pid,), daemon=True)
        watching.start()
        time.sleep(0.5)
        assert watching.is_alive() and folder.exists() and not gone(rank)
        driver.kill()
        watching.join(timeout=8)
        assert not watching.is_alive()
        deadline = time.monotonic() + 2  # SIGKILL is sent, not awaited
        while not gone(rank) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert gone(rank) and not folder.exists()
        assert foreign.exists(), "it belongs to another process"
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
        if not gone(rank):
            psutil.Process(rank).kill()
        for path in (folder, foreign):
            shutil.rmtree(path, ignore_errors=True)


def test_a_driver_that_is_already_gone():
    driver = subprocess.Popen([sys.executable, "-c", ""])
    driver.wait()
    guard.watch(driver.pid)
