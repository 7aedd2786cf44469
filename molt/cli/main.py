"""The console script `molt`. Commands are imported when they are asked for: `molt --help` is instant."""

import sys
from importlib import import_module
from pathlib import Path

from molt.cli.args import parse, run_command
from molt.config import RLConfig
from molt.config_sft import SftConfig
from molt.errors import ConfigError, did_you_mean

TRAINERS = {"rl": ("molt.cli.train_rl_ray", RLConfig), "sft": ("molt.cli.train_sft", SftConfig)}
HELP = """molt trains agents with reinforcement learning.

  molt demo                a tiny model learns a task on this machine; minutes on 2 CPU cores
  molt rl ...              asynchronous reinforcement learning of an agent
  molt sft ...             supervised fine-tuning
  molt check rl|sft ...    everything that can be checked without loading weights; same flags
  molt report RUN          writes the report page of an output directory

`molt COMMAND --help` lists its flags. Start with `molt demo`.
"""


def check(argv: list[str]) -> int:
    """`molt check [rl|sft] ...flags`: prints the findings; 1 if one is an error."""
    from molt.cli.check import show

    name, flags = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("rl", argv)
    if name not in TRAINERS:
        raise ConfigError(f"`molt check` has no {name!r}.{did_you_mean(name, TRAINERS)} Use rl or sft, then the flags.")
    module, config_class = TRAINERS[name]
    config = parse(config_class, flags, prog=f"molt check {name}")
    checks = import_module("molt.cli.advice").all_checks if name == "rl" else import_module(module).static_checks
    found = checks(config)
    show(found)
    return 1 if found.errors else 0


def report(argv: list[str]) -> int:
    """`molt report RUN`: RUN is an output directory, or its `run/`."""
    from molt.report.page import write_report

    run = Path(argv[0] if argv else "")
    run = run / "run" if (run / "run").is_dir() else run
    if not (run / "metrics.jsonl").is_file():
        raise ConfigError(f"RUN (={run}) has no metrics.jsonl: there is no run to report. Pass the --ckpt.output_dir.")
    print(write_report(run))
    return 0


def rl(argv: list[str]) -> int | None:
    """`molt rl`: the advice, then the trainer, which starts with its own checks."""
    from molt.cli.advice import advise
    from molt.cli.check import check_or_raise, show

    show(check_or_raise(parse(RLConfig, argv, prog="molt rl"), advise))
    return import_module("molt.cli.train_rl_ray").main(argv)


def sft(argv: list[str]) -> int | None:
    return import_module("molt.cli.train_sft").main(argv)


def demo(argv: list[str]) -> int | None:
    return import_module("molt.cli.demo").main(argv)


COMMANDS = {"demo": demo, "rl": rl, "sft": sft, "check": check, "report": report}


def main(argv: list[str] | None = None) -> int:
    """Run one command; the value is the exit code: 1 for what went wrong, 2 for a wrong command line."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if name not in COMMANDS:
        print(
            f"molt: error: unknown command {name!r}.{did_you_mean(name, COMMANDS)}\n\n{HELP}", end="", file=sys.stderr
        )
        return 2
    return run_command(COMMANDS[name], rest)


if __name__ == "__main__":
    sys.exit(main())
