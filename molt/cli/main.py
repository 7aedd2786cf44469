"""The console script `molt`. Commands are imported when they are asked for: `molt --help` is instant."""

import argparse
import sys

from molt.cli.args import parse, run_command
from molt.config import RLConfig
from molt.config_sft import SftConfig
from molt.errors import ConfigError, did_you_mean
from molt.paths import expanded

CHECKED = ("rl", "sft", "eval")
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
NO_EPISODE = "--no_episode"
"""The flag of `molt check` that leaves the episode out."""
CHECK_HELP = """usage: molt check [rl|sft|eval] [FLAGS]

Checks a run without loading weights: settings, model, tokenizer, chat template, agent file, datasets, devices, disk
space. rl and eval also play one episode of the agent with the first row, in which the model says 'hello'; --no_episode
leaves it out. Prints one finding a line; the exit code is 1 if one of them is an error.

  molt check rl ...        the flags of `molt rl` (also without the word rl)
  molt check sft ...       the flags of `molt sft`
  molt check eval ...      the flags of `molt eval`

`molt check rl --help` lists the flags.
"""


def check(argv: list[str]) -> int:
    """`molt check [rl|sft|eval] ...flags`: prints the findings; 1 if one is an error."""
    if argv and argv[0] in ("-h", "--help"):
        print(CHECK_HELP, end="")
        return 0
    command = "rl"
    flags = argv
    if argv and not argv[0].startswith("-"):
        command = argv[0]
        flags = argv[1:]

    if command == "rl":
        return _check_rl(flags)
    if command == "eval":
        return _check_eval(flags)
    if command == "sft":
        return _check_sft(flags)
    near = did_you_mean(command, CHECKED)
    raise ConfigError(f"`molt check` has no {command!r}.{near} Use rl, sft or eval, then the flags.")


def _check_rl(given: list[str]) -> int:
    flags = [flag for flag in given if flag != NO_EPISODE]
    config = parse(RLConfig, flags, prog="molt check rl", about="`molt check rl`: checks a run of `molt rl`.")
    if config.eval.eval_only:
        return _check_eval(given)
    from molt.cli.advice import all_checks
    from molt.cli.check import show
    from molt.cli.episode_check import check_episode

    found = all_checks(config)
    if NO_EPISODE not in given:
        check_episode(found, config)
    show(found)
    return _exit_code(found.errors)


def _check_eval(given: list[str]) -> int:
    flags = [flag for flag in given if flag != NO_EPISODE] + ["--eval.eval_only"]
    config = parse(RLConfig, flags, prog="molt check eval", about="`molt check eval`: checks a run of `molt eval`.")
    from molt.cli.check import evaluation_checks, show
    from molt.cli.episode_check import check_episode

    found = evaluation_checks(config)
    if NO_EPISODE not in given:
        check_episode(found, config)
    show(found)
    return _exit_code(found.errors)


def _check_sft(flags: list[str]) -> int:
    config = parse(SftConfig, flags, prog="molt check sft", about="`molt check sft`: checks a run of `molt sft`.")
    from molt.cli.check import show
    from molt.cli.train_sft import static_checks

    found = static_checks(config)
    show(found)
    return _exit_code(found.errors)


def _exit_code(errors: list[str]) -> int:
    if errors:
        return 1
    return 0


def report(argv: list[str]) -> int:
    """`molt report RUN`: RUN is an output directory, or its `run/`."""
    parser = argparse.ArgumentParser(prog="molt report", description="Writes report.html, the page of a run.")
    parser.add_argument("run", metavar="RUN", help="the --ckpt.output_dir of a run, or the run/ in it")
    arguments = parser.parse_args(argv)
    run = expanded(arguments.run)
    if (run / "run").is_dir():
        run = run / "run"
    if not (run / "metrics.jsonl").is_file():
        raise ConfigError(f"RUN (={run}) has no metrics.jsonl: there is no run to report. Pass the --ckpt.output_dir.")
    from molt.report.page import write_report

    print(write_report(run))
    return 0


def rl(argv: list[str]) -> int | None:
    """`molt rl`: the advice, then the trainer, which starts with its own checks; --supervise restarts it."""
    if "--supervise" in argv:
        from molt.cli.supervise import supervise

        return supervise([flag for flag in argv if flag != "--supervise"])
    config = parse(RLConfig, argv, prog="molt rl")
    if config.eval.eval_only:
        return evaluate(argv)
    from molt.cli.advice import advise
    from molt.cli.check import check_or_raise, show

    show(check_or_raise(config, advise))
    from molt.cli import train_rl_ray

    train_rl_ray.main(argv)
    return None


def sft(argv: list[str]) -> None:
    """`molt sft`."""
    from molt.cli import train_sft

    train_sft.main(argv)


def evaluate(argv: list[str]) -> None:
    """`molt eval`."""
    from molt.cli import eval as evaluation

    evaluation.main(argv)


def demo(argv: list[str]) -> None:
    """`molt demo`."""
    from molt.cli import demo as demonstration

    demonstration.main(argv)


def agent(argv: list[str]) -> int:
    """`molt agent check FILE`."""
    from molt.cli import agent as agent_commands

    return agent_commands.main(argv)


COMMANDS = {
    "demo": demo,
    "rl": rl,
    "sft": sft,
    "eval": evaluate,
    "check": check,
    "agent": agent,
    "report": report,
}


def print_help(_: list[str]) -> None:
    print(HELP, end="")


def main(argv: list[str] | None = None) -> int:
    """Run one command; the value is the exit code (docs/cli.md)."""
    if argv is None:
        argv = sys.argv[1:]
    if not argv:
        argv = ["--help"]
    name = argv[0]
    rest = argv[1:]
    if name in ("-h", "--help", "help"):
        return run_command(print_help, rest)
    if name not in COMMANDS:
        near = did_you_mean(name, COMMANDS)
        print(f"molt: error: unknown command {name!r}.{near}\n\n{HELP}", end="", file=sys.stderr)
        return 2
    return run_command(COMMANDS[name], rest)


if __name__ == "__main__":
    sys.exit(main())
