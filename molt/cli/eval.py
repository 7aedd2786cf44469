"""`molt eval`: score a model on a dataset with an agent. Only engines and runners start, no trainer is built.

    molt eval --actor.model_name_or_path DIR --eval.dataset FILE.jsonl --train.agent_path FILE.py ...

The flags are those of `molt rl`, and `molt rl --eval.eval_only` is the same. The last line on stdout is one JSON object
with the numbers of the table. Nothing is written into any run directory.
"""

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from molt.cli.args import parse
from molt.cli.check import check_or_raise, show
from molt.config import RLConfig
from molt.errors import FailureRateError

COLUMNS = [
    ("prompts", "prompts", ",.0f"),
    ("samples", "samples", ",.0f"),
    ("pass@1", "pass1", ".4f"),
    ("95 % from", "pass1_low", ".4f"),
    ("to", "pass1_high", ".4f"),
    ("length", "response_length", ".1f"),
    ("truncated", "truncated", ".1%"),
    ("failures", "failures", ",.0f"),
]
"""Label, number, format."""


def main(argv: list[str]) -> None:
    """Check, evaluate, print. Raises a MoltError when something is wrong, or when too much of it failed."""
    config = parse(RLConfig, [*argv, "--eval.eval_only"], prog="molt eval")
    show(check_or_raise(config))
    from molt.driver import run_evaluation

    present(config, *run_evaluation(config))


def present(config: RLConfig, answers: dict[str, Any], seconds: float) -> None:
    """Print a table by data source, then the same numbers as JSON.

    answers: `molt.rollout.evaluate.Answers`. Raises `FailureRateError`, instead, with the table of reasons when more
    than `rollout.max_failure_rate` of the rollouts have no result, or all of them.
    """
    console = Console()
    console = console if console.is_terminal else Console(width=120)
    failures = check_failures(answers, config.rollout.max_failure_rate)
    sources = numbers(answers)
    console.print(_table(sources, f"{config.actor.model_name_or_path} on {config.eval.dataset}, {seconds:.1f} s"))
    if failures:
        console.print(f"without a result, by reason:\n{failures}", markup=False, highlight=False, soft_wrap=True)
    summary = {"model": config.actor.model_name_or_path, "dataset": config.eval.dataset, "seconds": round(seconds, 3)}
    print(json.dumps({**summary, "sources": sources}), flush=True)


def numbers(answers: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By data source: prompts, samples asked for, and what `score` says, without the `eval/<source>/`."""
    from molt.report.metrics import values
    from molt.rollout.evaluate import score

    found: dict[str, dict[str, float]] = {}
    for source, groups in answers.items():
        scored = values(score({source: groups}))
        found[source] = {"prompts": len(groups), "samples": sum(map(len, groups))}
        found[source] |= {name.rpartition("/")[2]: value for name, value in scored.items()}
    return found


def check_failures(answers: dict[str, Any], limit: float) -> str:
    """The rollouts without a result by reason, one line each. Raises `FailureRateError` if they are too many."""
    from molt.rollout.evaluate import failures

    reasons, details = failures(answers)
    asked = sum(len(rollouts) for groups in answers.values() for rollouts in groups)
    table = "\n".join(f"  {count:5d}  {reason}: {details[reason]}" for reason, count in reasons.most_common())
    if reasons.total() > limit * asked or reasons.total() == asked:
        raise FailureRateError(
            f"{reasons.total()} of {asked} rollouts have no result, above rollout.max_failure_rate (={limit:g}): the "
            f"score of the others would say little about the model. Mend agent, engine or dataset. By reason:\n{table}"
        )
    return table


def _table(sources: dict[str, dict[str, float]], title: str) -> Table:
    best_of = sorted({name for found in sources.values() for name in found if name[4:].isdigit() and name != "pass1"})
    columns = [*COLUMNS[:5], *((f"pass@{name[4:]}", name, ".4f") for name in best_of), *COLUMNS[5:]]
    table = Table(title=title, title_justify="left")
    table.add_column("source", overflow="fold")
    for label, _, _ in columns:
        table.add_column(label, justify="right", no_wrap=True)
    for source, found in sources.items():
        table.add_row(source, *(format(found[name], form) if name in found else "-" for _, name, form in columns))
    return table
