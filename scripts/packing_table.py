"""The table of docs/packing.md: which causal LMs of the installed transformers keep packed samples apart.

python scripts/packing_table.py [--only llama,jamba] [--to docs/packing.md]

A child process tries each class with the sizes of its default configuration made small (`molt/models/packing.py`), with
every attention that runs on a CPU: some classes crash, and some never end. About 10 minutes on one core. What stands
between the two marks of the page is replaced; `--only` prints the rows instead.
"""

import argparse
import sys
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from molt.models.backends.choice import load_backend
from molt.models.backends.protocol import Backend
from molt.models.packing import try_packing

ROOT = Path(__file__).resolve().parent.parent
ATTENTIONS = ("varlen", "sdpa", "eager")
OF_AUTOMODEL = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe")
LFM2 = {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4}
HEADS = {"head_dim": 128, "num_key_value_heads": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "lfm2": LFM2,
    "lfm2_moe": LFM2,
    "ministral": HEADS,
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": HEADS,
    "nemotron": HEADS,
    "deepseek_v2": {"n_group": 8, "topk_group": 3, "num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "reformer": {"is_decoder": True},
}
"""Where the default configuration lacks layers, or sizes, that the models of the family have."""
LIMIT_S = 60
BEGIN = "<!-- begin: written by scripts/packing_table.py -->"
END = "<!-- end -->"


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
    rows = [(model_type, "transformers") for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    return rows + [(model_type, "automodel") for model_type in OF_AUTOMODEL]


def try_row(model_type: str, backend_name: str) -> list[Outcome]:
    """In this process: every attention for one class."""
    backend = load_backend(backend_name)
    attentions = ATTENTIONS
    if backend_name == "automodel":
        attentions = ("varlen",)
    outcomes = []
    for attention in attentions:
        outcomes.append(try_attention(model_type, backend, attention))
    return outcomes


def try_attention(model_type: str, backend: Backend, attention: str) -> Outcome:
    try:
        config = CONFIG_MAPPING[model_type](**SETTINGS.get(model_type, {}))
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
        trial = try_packing(backend, config, attention)
    except NotImplementedError:
        return Outcome("refused", "sinks or capped scores need eager")
    except Exception as error:  # of a foreign class
        if attention == "sdpa" and "does not support an attention implementation through" in str(error):
            return Outcome("refused", "the class has no sdpa")
        reason = " ".join(str(error).split())
        return Outcome("not built", f"{type(error).__name__}: {reason}"[:100])
    if trial.is_exact:
        return Outcome("exact", f"{max(trial.leak, trial.difference):.0e}")
    if trial.leaking_module:
        return Outcome("refused", f"{trial.leaking_module.split(' ')[0]} mixes samples ({trial.leak:.1g})")
    return Outcome("refused", f"differs from padded samples ({trial.difference:.1g})")


def send_row(model_type: str, backend_name: str, pipe: Connection) -> None:
    """What a child process does."""
    pipe.send(try_row(model_type, backend_name))


def try_row_in_child(model_type: str, backend_name: str) -> Row:
    """A child process may crash, or be ended at the deadline. It is forked: imports take longer than a trial."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=send_row, args=(model_type, backend_name, sender))
    child.start()
    sender.close()
    try:
        if receiver.poll(LIMIT_S):
            outcomes = receiver.recv()
        else:
            outcomes = [Outcome("not built", f"no end within {LIMIT_S} s")]
    except EOFError:
        child.join()
        outcomes = [Outcome("not built", f"the process ended with {child.exitcode}")]
    child.kill()
    child.join()
    return Row(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type], backend_name, outcomes)


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
    counts: dict[str, int] = {}
    for row in rows:
        verdict = row.outcomes[0].verdict
        counts[verdict] = counts.get(verdict, 0) + 1
    summary = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    lines = [
        f"transformers {transformers.__version__}, {len(rows)} rows; with varlen {summary}.",
        "",
        "| model type | class | varlen (`auto`) | sdpa | eager |",
        "|---|---|---|---|---|",
        *[render(row) for row in rows],
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the table of docs/packing.md.")
    parser.add_argument("--only", default="", help="model types, separated by commas; their rows are printed")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "packing.md")
    arguments = parser.parse_args()
    only = [name for name in arguments.only.split(",") if name]
    torch.set_num_threads(1)
    load_backend("transformers")

    rows = []
    for model_type, backend_name in rows_to_try():
        if not only or model_type in only:
            row = try_row_in_child(model_type, backend_name)
            print(render(row), file=sys.stderr, flush=True)
            rows.append(row)
    if only:
        print(table(rows))
        return
    before, _, rest = arguments.to.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    arguments.to.write_text(f"{before}{BEGIN}\n{table(rows)}{END}{after}")


if __name__ == "__main__":
    main()
