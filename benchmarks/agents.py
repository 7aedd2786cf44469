"""Does RL learn through agents? An SFT checkpoint and 80 on-policy training batches for each of two agents.

python benchmarks/agents.py [--output_dir DIR] [--only chat,tool] [--steps 80]

    chat    the task of `molt demo` through `examples/python/agents/chat_minimal.py`: the OpenAI client, unmodified,
            against the session's server
    tool    `_lookup.py`, an `Env` of two turns: a tool call, and an answer that only the tool's result reaches

Both are real runs of `molt sft` and `molt rl` with vLLM: grpo, 16 prompts x 8 rollouts, queue 0. Prints a table of
sampled pass@1 on 512 held-out prompts before and after, the largest |log ratio| of a trained token between trainer and
engine, and the seconds of a step; last the ratio of the smaller gain to the 0.25 that is asked for. Fails if that is
below 1, or if a log ratio is above 1e-4. About 7 minutes on two busy cores.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _lookup
from _common import spread

from molt.cli.demo import HELD_OUT, RL_ROWS, SFT_ROWS, build_data, build_model, rl_defaults, sft_flags, start_afresh
from molt.report.sinks import read_jsonl

SEED = 42
ASKED = 0.25
RATIO = 1e-4
TIMEOUT_S = 600
CHAT_MINIMAL = Path(__file__).resolve().parent.parent / "examples" / "python" / "agents" / "chat_minimal.py"
SLIPS = 0.06
UNCLOSED = 0.1
TEMPLATE = (
    "{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content }}"
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}"
    "{%- endfor %}{{- '<|end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
WORDS = ["<|tool|>", _lookup.OPEN, _lookup.CLOSE]
"""Tokens of their own, so that a call is eight tokens."""


@dataclass(frozen=True)
class Task:
    """One agent: what makes `data/` and `model/` in a folder, and the flags beside those of the demo."""

    prepare: Callable[[Path], Any]
    both: list[str]
    """Of SFT and RL."""
    agent: Path


def prepare_chat(folder: Path) -> None:
    """Exactly as `molt demo` makes them."""
    build_data(folder, SEED)
    build_model(folder / "model", SEED)


def prepare_tool(folder: Path) -> None:
    every = _lookup.rows(HELD_OUT + SFT_ROWS + RL_ROWS, SEED)
    held_out = every[:HELD_OUT]
    taught = every[HELD_OUT : HELD_OUT + SFT_ROWS]
    rest = every[HELD_OUT + SFT_ROWS :]
    taught = [row | {"label": _lookup.lesson(row, SEED, SLIPS, UNCLOSED)} for row in taught]
    (folder / "data").mkdir()
    for name, rows in (("held_out", held_out), ("sft", taught), ("rl", rest)):
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_model(folder / "model", SEED, WORDS, TEMPLATE)


TASKS = {
    "chat": Task(prepare_chat, [], CHAT_MINIMAL),
    "tool": Task(prepare_tool, ["--data.tools_key", "tools", "--data.max_len", "48"], Path(_lookup.__file__)),
}


def rl_flags(folder: Path, task: Task, steps: int) -> list[str]:
    return [
        *rl_defaults(folder, SEED),
        *task.both,
        "--train.agent_path", str(task.agent),
        "--train.async_queue_size", "0",
        "--train.max_steps", str(steps),
        "--rollout.batch_size", "16",
        "--eval.steps", "-1",
        "--ckpt.best_metric_key", "none",
        "--ckpt.save_steps", "-1",
    ]  # fmt: skip


def learn(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """SFT and RL of one task, and what they gave."""
    task = TASKS[name]
    start_afresh(folder)
    task.prepare(folder)
    for module, flags in (
        ("train_sft", [*sft_flags(folder, SEED), *task.both]),
        ("train_rl_ray", rl_flags(folder, task, steps)),
    ):
        subprocess.run([sys.executable, "-m", f"molt.cli.{module}", *flags], check=True, timeout=TIMEOUT_S)
    return {"name": name} | figures(list(read_jsonl(folder / "rl" / "run" / "metrics.jsonl")))


def figures(lines: list[dict[str, Any]]) -> dict[str, Any]:
    passed = [value for line in lines for key, value in line.items() if key.endswith("/pass1")]
    ratios, seconds = ([line[key] for line in lines if key in line] for key in ("ratio/log_abs_max", "timing/step_s"))
    return {"before": passed[0], "after": passed[-1], "ratio": max(ratios), "step": spread(seconds)}


def as_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| agent | pass@1 before | after | gain | ratio/log_abs_max | s per step |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r['name']} | {r['before']:.3f} | {r['after']:.3f} | {r['after'] - r['before']:+.3f} | {r['ratio']:.1e} | "
        f"{r['step']} |"
        for r in rows
    ]
    return "\n".join(lines)


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """What was asked for and did not happen."""
    wrong = []
    for r in rows:
        if r["after"] - r["before"] < ASKED:
            wrong.append(f"{r['name']} rose by {r['after'] - r['before']:.3f}, not by {ASKED}")
        if r["ratio"] > RATIO:
            wrong.append(f"{r['name']}: trainer and engine differ by {r['ratio']:.1e} on a token that it trains")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("benchmark_agents"))
    parser.add_argument("--only", default=",".join(TASKS), help="comma list of agents")
    parser.add_argument("--steps", type=int, default=80)
    arguments = parser.parse_args()
    folder = arguments.output_dir.resolve()
    rows = [learn(folder / name, name, arguments.steps) for name in arguments.only.split(",")]
    wrong = failures(rows)
    print(as_table(rows), *wrong, sep="\n")
    print(f"agents ratio={min(r['after'] - r['before'] for r in rows) / ASKED:.2f}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
