"""`python -m molt.guard PID`: no process outlives its driver by more than 10 s.

A driver that is killed cleans up nothing. Its ranks and engines notice by themselves, but some of Ray's
helpers wait a minute for a server that is gone, and a user's sandbox may never notice. So each driver
starts this process, which remembers the driver's descendants and ends those that are left behind.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import psutil

POLL_S, GRACE_S = 1.0, 5.0


def start(driver_pid: int) -> None:
    """Start a guard for `driver_pid`, in a session of its own: a Ctrl-C at the driver must not end it."""
    command = [sys.executable, "-m", "molt.guard", str(driver_pid)]
    # No inherited streams: whoever reads the driver's output must see its end.
    subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def watch(driver_pid: int) -> None:
    """Returns when the driver is gone and everything it started is, too."""
    family: set[psutil.Process] = set()
    pids: set[int] = set()
    try:
        driver = psutil.Process(driver_pid)
        while True:
            family = {process for process in family if process.is_running()} | set(driver.children(recursive=True))
            pids |= {process.pid for process in family}
            try:
                driver.wait(timeout=POLL_S)
                break
            except psutil.TimeoutExpired:
                continue
    except psutil.NoSuchProcess:
        pass
    family.discard(psutil.Process())
    _, left = psutil.wait_procs(family, timeout=GRACE_S)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=1.0)
    for pid in pids:  # a rank that was killed while it published (`publish/transfer.py`)
        for folder in Path("/dev/shm").glob(f"molt-weights-{pid}-*"):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(int(sys.argv[1]))
