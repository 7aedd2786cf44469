"""`molt rl --supervise ...`: restarts the driver, with resume, when it dies or loses a machine."""

import signal
import subprocess
import sys
from types import FrameType

from molt.cli.args import LOST, parse
from molt.config import RLConfig

RESUME = "--ckpt.load_enable"


def supervise(argv: list[str], command: str = "molt rl") -> int:
    """Run `python -m COMMAND ARGV` until it ends by itself; the value is its exit code.

    A driver that a signal killed, or that lost processes for good, is restarted from its last checkpoint, at most
    `train.max_restarts` times without a new checkpoint in between. Every other error is the user's to fix. SIGTERM
    is passed on to the driver, and Ctrl-C in a terminal reaches it anyway: it saves and ends, and so does this.
    """
    config = parse(RLConfig, argv, prog="molt rl")
    driver = Driver(command)
    signal.signal(signal.SIGTERM, driver.on_signal)
    signal.signal(signal.SIGINT, driver.on_signal)

    restarts = 0
    last_step = _last_step(config)
    while True:
        code = driver.run(argv)
        was_killed = code < 0
        if driver.is_ending or not (was_killed or code == LOST):
            return 128 - code if was_killed else code

        step = _last_step(config)
        if step > last_step:
            restarts = 0
        restarts += 1
        last_step = step
        reason = f"was killed by {signal.Signals(-code).name}" if was_killed else "lost processes"
        if restarts > config.train.max_restarts:
            print(
                f"molt: error: the driver {reason}, {restarts} times without a new checkpoint: train.max_restarts "
                f"(={config.train.max_restarts}) is reached, so it is not restarted. Fix what kills it.",
                file=sys.stderr,
            )
            return LOST
        start = f"step {step}" if step >= 0 else "the beginning"
        print(f"molt: the driver {reason}; restart {restarts} from {start}", file=sys.stderr)
        if RESUME not in argv:
            argv = [*argv, RESUME]


class Driver:
    """The process that is supervised, and the signals on their way to it."""

    def __init__(self, command: str):
        self._command = command.split()
        self._process: subprocess.Popen[bytes] | None = None
        self._missed_a_signal = False
        self.is_ending = False
        """A signal asked the run to end."""

    def run(self, argv: list[str]) -> int:
        """Start a driver and wait; the value is its exit code, negative for a signal."""
        process = subprocess.Popen([sys.executable, "-m", *self._command, *argv])
        self._process = process
        if self._missed_a_signal:
            process.terminate()
        code = process.wait()
        self._process = None
        return code

    def on_signal(self, number: int, _: FrameType | None) -> None:
        self.is_ending = True
        if self._process is None:
            self._missed_a_signal = True
        elif number == signal.SIGTERM:
            self._process.terminate()


def _last_step(config: RLConfig) -> int:
    """That of the last checkpoint; -1: there is none."""
    from molt.train.checkpoint import checkpoint_step, latest_checkpoint  # not before the flags are checked

    checkpoint = latest_checkpoint(config.ckpt.checkpoints)
    if checkpoint is None:
        return -1
    return checkpoint_step(checkpoint)
