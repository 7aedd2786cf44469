"""The table of docs/packing.md: which causal LMs of the installed transformers keep packed samples apart.

python scripts/packing_table.py [--only llama,jamba] [--jobs 2] [--to docs/packing.md]

A child process tries each class with the sizes of its default configuration made small (`molt/models/packing.py`), with
every attention that runs on a CPU: some classes crash, and some never end. About 20 minutes on one core. What stands
between the two marks of the page is replaced; `--only` prints the rows instead.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ATTENTIONS = ("varlen", "sdpa", "eager")
LIMIT_S = 240
BEGIN = "<!-- begin: written by scripts/packing_table.py -->"
END = "<!-- end -->"
RESULT = "RESULT "
"""What starts the line of a child's result: some classes print."""


@dataclass(frozen=True)
class Outcome:
    """What a trial showed."""

    verdict: str
    """exact, refused, or not built."""
    detail: str


@dataclass(frozen=True)
class Row:
    """A class, and its outcome with each attention."""

    model_type: str
    class_name: str
    backend: str
    outcomes: list[Outcome]


def rows_to_try() -> list[tuple[str, str]]:
    """(model type, back end) of every row."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    automodel = ["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe"]
    rows = [(model_type, "transformers") for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    return rows + [(model_type, "automodel") for model_type in automodel]


def try_row(model_type: str, backend_name: str) -> Row:
    """In this process: every attention for one class."""
    import torch
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from molt.models.backends.choice import load_backend

    torch.set_num_threads(1)
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    backend = load_backend(backend_name)
    attentions = ATTENTIONS
    if backend_name == "automodel":
        attentions = ("varlen",)

    outcomes = []
    for attention in attentions:
        config = CONFIG_MAPPING[model_type]()
        config.architectures = [class_name]
        outcomes.append(try_attention(backend, config, attention))
    return Row(model_type, class_name, backend_name, outcomes)


def try_attention(backend, config, attention: str) -> Outcome:
    from molt.models.packing import try_packing

    try:
        trial = try_packing(backend, config, attention)
    except Exception as error:  # of a foreign class
        reason = str(error).strip().splitlines() or [""]
        return Outcome("not built", f"{type(error).__name__}: {reason[0]}"[:120])
    if trial.is_exact:
        return Outcome("exact", f"{max(trial.leak, trial.difference):.0e}")
    if trial.leaking_module:
        return Outcome("refused", f"{trial.leaking_module.split(' ')[0]} mixes samples ({trial.leak:.1g})")
    return Outcome("refused", f"differs from padded samples ({trial.difference:.1g})")


def try_row_in_child(only: tuple[str, str]) -> Row:
    """A child process may crash, or be ended at the deadline."""
    model_type, backend = only
    command = [sys.executable, __file__, "--child", model_type, backend]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return Row(model_type, "", backend, [Outcome("not built", f"no end within {LIMIT_S} s")])
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            fields = json.loads(line.removeprefix(RESULT))
            outcomes = [Outcome(**outcome) for outcome in fields.pop("outcomes")]
            row = Row(**fields, outcomes=outcomes)
            print(render(row), file=sys.stderr, flush=True)
            return row
    last_line = (done.stderr.strip().splitlines() or [""])[-1]
    return Row(model_type, "", backend, [Outcome("not built", f"exit code {done.returncode}: {last_line}"[:160])])


def cell(outcome: Outcome) -> str:
    return f"{outcome.verdict}: {outcome.detail}".replace("|", "/").replace("<", "").replace(">", "")


def render(row: Row) -> str:
    """The line of a row; an outcome that all attentions share is written once."""
    cells = [cell(outcome) for outcome in row.outcomes]
    if len(set(cells)) == 1 and len(cells) > 1:
        cells = [cells[0], '"', '"']
    while len(cells) < len(ATTENTIONS):
        cells.append("")
    name = row.class_name
    if row.backend != "transformers":
        name = f"{name} ({row.backend})"
    return f"| {row.model_type} | {name} | {' | '.join(cells)} |"


def table(rows: list[Row]) -> str:
    """Markdown."""
    import transformers

    counts = {}
    for row in rows:
        verdict = row.outcomes[0].verdict
        counts[verdict] = counts.get(verdict, 0) + 1
    summary = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    head = f"transformers {transformers.__version__}, {len(rows)} rows; with varlen {summary}.\n\n"
    head += "| model type | class | varlen (`auto`) | sdpa | eager |\n|---|---|---|---|---|\n"
    return head + "\n".join(render(row) for row in rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="model types, separated by commas")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "packing.md")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(RESULT + json.dumps(asdict(try_row(*arguments.child))))
        return

    chosen = [name for name in arguments.only.split(",") if name]
    to_try = [row for row in rows_to_try() if not chosen or row[0] in chosen]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        rows = list(pool.map(try_row_in_child, to_try))
    if chosen:
        print(table(rows))
        return
    page = arguments.to.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    arguments.to.write_text(f"{before}{BEGIN}\n{table(rows)}{END}{after}")


if __name__ == "__main__":
    main()
