"""`python -m molt.cli.train_rl_ray`: asynchronous RL. Wrong settings are reported before Ray or vLLM is imported."""

import os
import sys

from molt.cli.args import parse, run_command
from molt.config import RLConfig


def main(argv: list[str] | None = None) -> None:
    """Check, then train. Raises a MoltError when something is wrong."""
    if argv is None:
        argv = sys.argv[1:]
    config = parse(RLConfig, argv, prog="molt rl")
    if config.eval.eval_only:  # another program, which replaces this one
        os.execv(sys.executable, [sys.executable, "-m", "molt", "eval", *argv])
    from molt.cli.check import check_or_raise, show, static_checks

    show(check_or_raise(config, static_checks))
    from molt.spec import resolve

    spec = resolve(config)
    from molt.driver import run_rl

    run_rl(spec)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
