"""`molt eval`: score a model on a dataset with an agent. Only engines and runners start, no trainer is built.

    molt eval --actor.model_name_or_path DIR --eval.dataset FILE.jsonl --train.agent_path FILE.py ...

The flags are those of `molt rl`, and `molt rl --eval.eval_only` is the same. The last line on stdout is one JSON object
with the numbers of the table. Nothing is written into any run directory.
"""

import json
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table

from molt.cli.args import parse
from molt.config import RLConfig
from molt.errors import FailureRateError

if TYPE_CHECKING:  # imported once the flags are known to be right
    from molt.rollout.evaluate import Answers

ABOUT = "`molt eval`: the score of a model on a dataset. The flags are those of `molt rl`; no trainer is built."


class Column(NamedTuple):
    """One column of the table."""

    label: str
    number: str
    """Its name in the JSON."""
    format: str


BEFORE_BEST_OF = [
    Column("prompts", "prompts", ",.0f"),
    Column("samples", "samples", ",.0f"),
    Column("pass@1", "pass1", ".4f"),
    Column("95 % from", "pass1_low", ".4f"),
    Column("to", "pass1_high", ".4f"),
]
AFTER_BEST_OF = [
    Column("length", "response_length", ".1f"),
    Column("truncated", "truncated", ".1%"),
    Column("failures", "failures", ",.0f"),
]

Numbers = dict[str, dict[str, float]]
"""By data source, then by name."""


def main(argv: list[str]) -> None:
    """Check, evaluate, print. Raises a MoltError when something is wrong, or when too much of it failed."""
    config = parse(RLConfig, [*argv, "--eval.eval_only"], prog="molt eval", about=ABOUT)
    from molt.cli.check import check_or_raise, evaluation_checks, show

    show(check_or_raise(config, evaluation_checks))
    from molt.spec import resolve_evaluation

    spec = resolve_evaluation(config)
    from molt.driver import run_evaluation

    answers, seconds = run_evaluation(spec)
    present(config, answers, seconds)


def present(config: RLConfig, answers: "Answers", seconds: float) -> None:
    """Print a table by data source, then the same numbers as JSON.

    Raises `FailureRateError`, instead, with the table of reasons when more than `rollout.max_failure_rate` of the
    rollouts have no result, or all of them.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    failures = check_failures(answers, config.rollout.max_failure_rate)
    sources = numbers(answers)
    model = config.actor.model_name_or_path
    dataset = config.eval.dataset
    console.print(_table(sources, f"{model} on {dataset}, {seconds:.1f} s"))
    if failures:
        console.print(f"without a result, by reason:\n{failures}", markup=False, highlight=False, soft_wrap=True)
    summary = {"model": model, "dataset": dataset, "seconds": round(seconds, 3), "sources": sources}
    print(json.dumps(summary), flush=True)


def numbers(answers: "Answers") -> Numbers:
    """By data source: prompts, samples asked for, and the numbers of `score` without their `eval/<source>/`."""
    from molt.report.metrics import is_count, values
    from molt.rollout.evaluate import score

    sources: Numbers = {}
    for source, groups in answers.items():
        samples = sum(len(rollouts) for rollouts in groups)
        sources[source] = {"prompts": len(groups), "samples": samples}
        for metric, value in values(score({source: groups})).items():
            name = metric.rpartition("/")[2]
            sources[source][name] = round(value) if is_count(metric) else value
    return sources


def check_failures(answers: "Answers", limit: float) -> str:
    """The rollouts without a result by reason, one line each. Raises `FailureRateError` if they are too many."""
    from molt.rollout.evaluate import failures

    reasons, details = failures(answers)
    table = _failure_table(reasons, details)
    rollouts = 0
    for groups in answers.values():
        rollouts += sum(len(group) for group in groups)
    failed = reasons.total()
    if failed > limit * rollouts or failed == rollouts:
        raise FailureRateError(
            f"{failed} of {rollouts} rollouts have no result, above rollout.max_failure_rate (={limit:g}): the "
            f"score of the others would say little about the model. Fix agent, engine or dataset. By reason:\n{table}"
        )
    return table


def _failure_table(reasons: Counter[str], details: dict[str, str]) -> str:
    lines: list[str] = []
    for reason, count in reasons.most_common():
        lines.append(f"  {count:5d}  {reason}: {details[reason]}")
    return "\n".join(lines)


def _table(sources: Numbers, title: str) -> Table:
    columns = [*BEFORE_BEST_OF, *_best_of(sources), *AFTER_BEST_OF]
    table = Table(title=title, title_justify="left")
    table.add_column("source", overflow="fold")
    for column in columns:
        table.add_column(column.label, justify="right", no_wrap=True)
    for source, values in sources.items():
        cells = [_cell(values, column) for column in columns]
        table.add_row(source, *cells)
    return table


def _best_of(sources: Numbers) -> list[Column]:
    """A column for each `pass<k>` above pass1."""
    names: set[str] = set()
    for values in sources.values():
        names.update(name for name in values if name.startswith("pass") and name[4:].isdigit())
    names.discard("pass1")
    return [Column(f"pass@{name[4:]}", name, ".4f") for name in sorted(names)]


def _cell(values: dict[str, float], column: Column) -> str:
    if column.number not in values:
        return "-"
    return format(values[column.number], column.format)
