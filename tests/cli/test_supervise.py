"""`molt rl --supervise`: what is started again, with a driver that does as it is told; once for real."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from molt.cli.args import LOST
from molt.cli.supervise import supervise
from molt.train.checkpoint import latest_checkpoint
from tests.chaos import family, wait
from tests.runs import events, flags, trained_groups, write_prompts

ROOT = Path(__file__).parents[2]
DRIVER = """
import os, signal, sys, time
from pathlib import Path

with open("lives", "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
lives = len(Path("lives").read_text().splitlines())
what, _, value = Path("plan").read_text().split()[lives - 1].partition(":")
if what == "save":
    folder = Path(f"out/checkpoints/step_{int(value):06d}")
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"files": {}}')
if what in ("die", "save"):
    os.kill(os.getpid(), signal.SIGKILL)
if what == "exit":
    sys.exit(int(value))
saves = lambda *_: Path("signals").open("a").write("signal ")
for number in (signal.SIGTERM, signal.SIGINT) if what == "obey" else ():
    signal.signal(number, saves)
Path("waits").touch()
for _ in range(1200):
    if Path("signals").exists():
        break
    time.sleep(0.05)
time.sleep(0.5)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current one, with the module `obedient`: the n-th driver does the n-th thing of the file `plan`.

    die; save:STEP (then die); exit:CODE; obey (a signal ends it with 0); wait (a signal kills it).
    """
    (tmp_path / "obedient.py").write_text(DRIVER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def supervised(folder: Path, plan: str, *more: str) -> tuple[int, list[str]]:
    """The exit code, and the last argument of every driver."""
    (folder / "plan").write_text(plan)
    code = supervise(flags("m", folder / "out", "p.jsonl", *more), "obedient")
    return code, [line.split()[-1] for line in (folder / "lives").read_text().splitlines()]


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_driver_that_ends_by_itself_is_not_started_again(folder, code):
    """1: an error such as that of the breaker; 2: one of the settings."""
    assert supervised(folder, f"exit:{code}", "--train.seed", "7") == (code, ["7"])


def test_one_that_dies_or_loses_machines_is_started_again_with_resume(folder, capfd):
    code, lives = supervised(folder, f"die save:4 exit:{LOST} exit:0", "--train.seed", "7")
    assert (code, lives) == (0, ["7", *["--ckpt.load_enable"] * 3])
    assert capfd.readouterr().err.splitlines() == [
        "molt: the driver was killed by SIGKILL; restart 1 from the beginning",
        "molt: the driver was killed by SIGKILL; restart 1 from step 4",
        "molt: the driver lost processes; restart 2 from step 4",
    ]


def test_without_progress_it_gives_up(folder, capfd):
    code, lives = supervised(folder, "save:2 die save:4 die die", "--train.max_restarts", "2")
    assert code == LOST and len(lives) == 5
    last = capfd.readouterr().err.splitlines()[-1]
    assert "was killed by SIGKILL" in last and "train.max_restarts (=2) is reached" in last


@pytest.mark.parametrize(("driver", "number", "code"), [
    ("obey", signal.SIGTERM, 0), ("obey", signal.SIGINT, 0), ("wait", signal.SIGTERM, 128 + signal.SIGTERM),
])  # fmt: skip
def test_a_signal_reaches_the_driver_once_and_nothing_is_started_again(folder, driver, number, code):
    """SIGTERM is sent to the supervisor alone, Ctrl-C in a terminal to both. A driver that still starts just dies."""

    def send():
        deadline = time.monotonic() + 60
        while not (folder / "waits").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        (child,) = (process for process in psutil.Process().children() if "obedient" in process.cmdline())
        os.kill(os.getpid(), number)
        if number == signal.SIGINT:
            child.send_signal(number)

    sender = threading.Thread(target=send)
    sender.start()
    assert supervised(folder, f"{driver} exit:9", "--train.seed", "7") == (code, ["7"])
    sender.join()
    assert driver == "wait" or (folder / "signals").read_text() == "signal "


@pytest.mark.ray
def test_a_killed_driver_is_resumed_to_the_end(model_dir, tmp_path):
    output, log = tmp_path / "out", tmp_path / "log"
    arguments = flags(model_dir, output, write_prompts(tmp_path / "p.jsonl", 40), "--ckpt.save_steps", "2")
    command = [sys.executable, "-m", "tests.chaos", "--supervise", "tests.runs", *arguments]
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    try:
        wait(process, lambda: latest_checkpoint(output / "checkpoints"), 240)
        (driver,) = family(process, "driver")
        os.kill(driver.pid, signal.SIGKILL)
        killed = time.time()
        assert process.wait(timeout=240) == 0, log.read_text()[-3000:]
    finally:
        for left in [*psutil.Process(process.pid).children(), process] if process.poll() is None else []:
            left.kill()
    (resumed,) = events(output, "resumed")
    assert resumed["step"] >= 2 and resumed["time"] > killed
    assert f"the driver was killed by SIGKILL; restart 1 from step {resumed['step']}" in log.read_text()
    assert sorted(trained_groups(output)) == sorted(f"0:{i}" for i in range(40))
