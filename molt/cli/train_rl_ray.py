"""`python -m molt.cli.train_rl_ray`: asynchronous RL. What is wrong is said before Ray or vLLM is imported."""

import sys

from molt.cli.args import parse, run_command
from molt.cli.check import check_or_raise, show
from molt.config import RLConfig


def main(argv: list[str] | None = None) -> None:
    """Check, then train. Raises a MoltError when something is wrong."""
    config = parse(RLConfig, sys.argv[1:] if argv is None else argv, prog="molt rl")
    show(check_or_raise(config))
    from molt.driver import run_rl

    run_rl(config)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
