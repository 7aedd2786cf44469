"""The console script `molt`. Commands are imported when they are asked for: `molt --help` is instant."""

import sys
from importlib import import_module
from pathlib import Path

from molt.cli.args import parse, run_command
from molt.config import RLConfig
from molt.config_sft import SftConfig
from molt.errors import ConfigError, did_you_mean

CHECKS = {
    "rl": ("molt.cli.advice", "all_checks", RLConfig),
    "sft": ("molt.cli.train_sft", "static_checks", SftConfig),
    "eval": ("molt.cli.check", "static_checks", RLConfig),
}
HELP = """molt trains agents with reinforcement learning.

  molt demo                a tiny model learns a task on this machine; minutes on 2 CPU cores
  molt rl ...              asynchronous reinforcement learning of an agent; --supervise restarts a driver that dies
  molt sft ...             supervised fine-tuning
  molt eval ...            the score of a model on a dataset; same flags as rl, no trainer is built
  molt check rl|sft|eval   everything that can be checked without loading weights; same flags
  molt agent check FILE    one episode of an agent against a scripted model, and its token tree
  molt report RUN          writes the report page of an output directory

`molt COMMAND --help` lists its flags. Start with `molt demo`.
"""


def check(argv: list[str]) -> int:
    """`molt check [rl|sft|eval] ...flags`: prints the findings; 1 if one is an error."""
    from molt.cli.check import show

    name, flags = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("rl", argv)
    if name not in CHECKS:
        near = did_you_mean(name, CHECKS)
        raise ConfigError(f"`molt check` has no {name!r}.{near} Use rl, sft or eval, then the flags.")
    if name == "rl" and parse(RLConfig, flags, prog="molt check rl").eval.eval_only:
        name = "eval"
    module, function, config_class = CHECKS[name]
    config = parse(config_class, [*flags, "--eval.eval_only"] if name == "eval" else flags, prog=f"molt check {name}")
    found = getattr(import_module(module), function)(config)
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
    """`molt rl`: the advice, then the trainer, which starts with its own checks; --supervise starts it again."""
    if "--supervise" in argv:
        return import_module("molt.cli.supervise").supervise([flag for flag in argv if flag != "--supervise"])
    from molt.cli.advice import advise
    from molt.cli.check import check_or_raise, show

    config = parse(RLConfig, argv, prog="molt rl")
    if config.eval.eval_only:
        return evaluate(argv)
    show(check_or_raise(config, advise))
    return import_module("molt.cli.train_rl_ray").main(argv)


def sft(argv: list[str]) -> int | None:
    return import_module("molt.cli.train_sft").main(argv)


def evaluate(argv: list[str]) -> int | None:
    return import_module("molt.cli.eval").main(argv)


def demo(argv: list[str]) -> int | None:
    return import_module("molt.cli.demo").main(argv)


def agent(argv: list[str]) -> int | None:
    return import_module("molt.cli.agent").main(argv)


COMMANDS = {
    "demo": demo, "rl": rl, "sft": sft, "eval": evaluate, "check": check, "agent": agent, "report": report,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run one command; the value is the exit code (docs/cli.md)."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help", "help"):
        return run_command(lambda _: print(HELP, end=""), rest)
    if name not in COMMANDS:
        print(
            f"molt: error: unknown command {name!r}.{did_you_mean(name, COMMANDS)}\n\n{HELP}", end="", file=sys.stderr
        )
        return 2
    return run_command(COMMANDS[name], rest)


if __name__ == "__main__":
    sys.exit(main())
