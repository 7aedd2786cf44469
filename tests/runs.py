"""Whole RL runs over `FakeEngine`: settings, data and a look at what they leave.

python -m tests.runs FLAGS...      one run, or evaluation, in a process of its own, to be signalled or killed
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from molt.cli.args import parse
from molt.columns import TokenColumns
from molt.config import RLConfig
from molt.driver import drive, run_evaluation, run_rl
from molt.spec import resolve, resolve_evaluation
from tests.fakes import FakeEngineWorker

AGENT = str(Path(__file__).parent / "sevens.py")


def write_prompts(path: Path, count: int, labels: dict[int, str] | None = None) -> str:
    rows = [{"input": f"say {i}", "label": (labels or {}).get(i, "")} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def flags(model_dir: str, output: Path, prompts: str, *more: str) -> list[str]:
    """4 prompts x 4 rollouts of 4 tokens a step."""
    return [
        "--actor.model_name_or_path", model_dir,
        "--actor.gradient_checkpoint", "none",
        "--actor.adam.lr", "1e-2",
        "--data.prompt_dataset", prompts,
        "--data.label_key", "label",
        "--data.apply_chat_template",
        "--data.max_len", "96",
        "--algo.advantage.estimator", "grpo",
        "--rollout.batch_size", "4",
        "--rollout.n_samples_per_prompt", "4",
        "--rollout.max_new_tokens", "4",
        "--train.agent_path", AGENT,
        "--train.micro_batch_size", "16",
        "--ckpt.output_dir", str(output),
        *more,
    ]  # fmt: skip


def settings(*args, **kwargs) -> RLConfig:
    return parse(RLConfig, flags(*args, **kwargs), prog="test")


def run(config: RLConfig, engine_worker: Any = FakeEngineWorker) -> None:
    """One run in the Ray session that is there; raises what stopped it, out of its task groups."""
    try:
        asyncio.run(drive(resolve(config), engine_worker))
    except ExceptionGroup as group:
        while isinstance(group, ExceptionGroup):
            group = group.exceptions[0]
        raise group from None


def metrics(output: Path, name: str) -> list[float]:
    """One metric of every training step, in order."""
    lines = [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line and line["step"] > 0]


def events(output: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (output / "run" / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def trained_groups(output: Path) -> list[str]:
    """The group ids of all stored rollouts, one per step and group."""
    import pyarrow.parquet as pq

    found = []
    for path in sorted((output / "run" / "rollouts").glob("step_*.parquet")):
        found += sorted(set(pq.read_table(path, columns=["group_id"])["group_id"].to_pylist()))
    return found


def forbid_arrays() -> None:
    """From now on this process fails when it unpickles token columns: a driver awaits light records alone."""

    def refuse(self: TokenColumns, state: object) -> None:
        raise AssertionError("token columns were unpickled in the driver")

    TokenColumns.__setstate__ = refuse  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    forbid_arrays()
    from molt.cli.eval import present
    from molt.cli.main import run_command

    def command(argv: list[str]) -> None:
        config = parse(RLConfig, argv, prog="test")
        if config.eval.eval_only:
            present(config, *run_evaluation(resolve_evaluation(config), FakeEngineWorker))
        else:
            run_rl(resolve(config), FakeEngineWorker)

    sys.exit(run_command(command, sys.argv[1:]))
