"""`python -m molt.cli.train_rl_ray`: asynchronous RL. What is wrong is said before Ray or vLLM is imported."""

import os
import sys

from molt.cli.args import parse, run_command
from molt.cli.check import check_or_raise, show
from molt.config import RLConfig


def main(argv: list[str] | None = None) -> None:
    """Check, then train. Raises a MoltError when something is wrong."""
    argv = sys.argv[1:] if argv is None else argv
    config = parse(RLConfig, argv, prog="molt rl")
    if config.eval.eval_only:  # another program, which this one becomes
        os.execv(sys.executable, [sys.executable, "-m", "molt", "eval", *argv])
    show(check_or_raise(config))
    from molt.driver import run_rl

    run_rl(config)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
