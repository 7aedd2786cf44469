"""`molt rl --supervise ...`: starts the driver again, with resume, when it dies or loses a machine."""

import signal
import subprocess
import sys
from typing import Any

from molt.cli.args import LOST, parse
from molt.config import RLConfig
from molt.train.checkpoint import checkpoint_step, latest_checkpoint


def supervise(argv: list[str], command: str = "molt rl") -> int:
    """Run `python -m COMMAND ARGV` until it ends by itself; the value is its exit code.

    A driver that a signal killed, or that lost processes for good, is started again from its last checkpoint, up
    to `train.max_restarts` times without a new checkpoint in between. Every other error is the user's to mend. SIGTERM
    is passed on to the driver, and Ctrl-C in a terminal reaches it anyway: it saves and ends, and so does this.
    """
    config = parse(RLConfig, argv, prog="molt rl")
    restarts, last = 0, _step(config)
    driver: subprocess.Popen | None = None
    ending, missed = False, False

    def end(number: int, _: Any) -> None:
        nonlocal ending, missed
        ending = True
        if number == signal.SIGTERM and driver is not None:
            driver.terminate()
        missed |= driver is None

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    while True:
        driver = subprocess.Popen([sys.executable, "-m", *command.split(), *argv])
        if missed:
            driver.terminate()
        code, driver = driver.wait(), None
        if ending or (code >= 0 and code != LOST):
            return code if code >= 0 else 128 - code
        step = _step(config)
        restarts, last = (1 if step > last else restarts + 1), step
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "lost processes"
        if restarts > config.train.max_restarts:
            print(
                f"molt: error: the driver {how}, {restarts} times without a new checkpoint: train.max_restarts "
                f"(={config.train.max_restarts}) is reached and nothing is started again. Mend what kills it.",
                file=sys.stderr,
            )
            return LOST
        where = f"step {step}" if step >= 0 else "the beginning"
        print(f"molt: the driver {how}; restart {restarts} from {where}", file=sys.stderr)
        if "--ckpt.load_enable" not in argv:
            argv = [*argv, "--ckpt.load_enable"]


def _step(config: RLConfig) -> int:
    checkpoint = latest_checkpoint(config.ckpt.checkpoints)
    return checkpoint_step(checkpoint) if checkpoint else -1
