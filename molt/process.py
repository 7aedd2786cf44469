"""What every process of molt does before anything else."""

import logging

from molt.rare_gc import collect_rarely


def prepare() -> None:
    """Make full garbage collections rare, and let third-party libraries report errors alone."""
    collect_rarely()
    logging.getLogger("vllm").setLevel(logging.ERROR)  # it logs before it reads VLLM_LOGGING_LEVEL
