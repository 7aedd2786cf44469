"""`python -m molt.guard PID`: no process outlives its driver by more than 10 s.

A driver that is killed cleans up nothing. Its ranks and engines notice by themselves, but some of Ray's
helpers wait a minute for a server that is gone, and a user's sandbox may never notice. So each driver
starts this process, which remembers the driver's descendants and ends those that outlive it.
"""

import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

POLL_S = 1.0
GRACE_S = 5.0
"""What the processes have to end by themselves once the driver is gone."""


def start(driver_pid: int) -> None:
    """Start a guard for `driver_pid`, in a session of its own: a Ctrl-C at the driver must not end it."""
    command = [sys.executable, "-m", "molt.guard", str(driver_pid)]
    # No inherited streams: whoever reads the driver's output must see its end.
    subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def watch(driver_pid: int) -> None:
    """Return when the driver and everything that it started are gone."""
    descendants = Descendants()
    try:
        driver = psutil.Process(driver_pid)
        while driver.is_running():
            descendants.update(driver)
            with suppress(psutil.TimeoutExpired):
                driver.wait(timeout=POLL_S)
                break
    except psutil.NoSuchProcess:
        pass
    descendants.end()
    descendants.remove_weights()


class Descendants:
    """The processes that a driver started, also those that lost their parents."""

    def __init__(self):
        self._alive: set[psutil.Process] = set()
        self._pids: set[int] = set()
        """Of all that there ever were."""

    def update(self, driver: psutil.Process) -> None:
        """Add the new ones. Raises `psutil.NoSuchProcess` if the driver is gone."""
        alive = {process for process in self._alive if process.is_running()}
        alive.update(driver.children(recursive=True))
        self._alive = alive
        self._pids.update(process.pid for process in alive)

    def end(self) -> None:
        """Kill those that are still there after `GRACE_S`."""
        self._alive.discard(psutil.Process())
        _, alive = psutil.wait_procs(self._alive, timeout=GRACE_S)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=1.0)

    def remove_weights(self) -> None:
        """Remove the shared memory of ranks that were killed during a weight sync (`publish/transfer.py`)."""
        for pid in self._pids:
            for folder in Path("/dev/shm").glob(f"molt-weights-{pid}-*"):
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(int(sys.argv[1]))
