"""Where the numbers of a run go: its directory, the console, TensorBoard.

`metrics.jsonl` and `rollouts/` hold the lineage of the final weights alone: steps that a resume
abandons move to `abandoned/`. `events.jsonl` keeps everything.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import Progress

from molt.config import LoggerConfig
from molt.report.console import step_line
from molt.report.rollouts import step_of


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file; a line torn by a crash is dropped, a missing file is empty."""
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def json_line(record: dict[str, Any]) -> str:
    """One line of valid JSON: non-finite numbers become null, which JSON has no other word for."""
    text = json.dumps(record, default=lambda value: value.item() if hasattr(value, "item") else str(value))
    return json.dumps(json.loads(text, parse_constant=lambda _: None)) + "\n"


class RunLog(ExitStack):
    """Owns a run directory and what is open in it. Use as a context manager, or call `close`."""

    def __init__(
        self, run_dir: Path, logger: LoggerConfig, header: str, total_steps: int | None, resume_step: int | None = None
    ):
        super().__init__()
        self.run_dir, self.logger, self.total_steps = run_dir, logger, total_steps
        self.lost_points = 0
        """Steps that TensorBoard did not take."""
        self._console = Console(soft_wrap=True)
        self._console.print(header, markup=False, highlight=False)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._events = self.enter_context(_append_to(run_dir / "events.jsonl"))
        self._metrics: IO[str] | None = None
        if resume_step is not None:
            self.abandon(resume_step)
        else:
            self._open_metrics()
        self._tensorboard = None
        if logger.tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter  # slow, and most runs do without

            purge_step = None if resume_step is None else resume_step + 1
            self._tensorboard = self.enter_context(SummaryWriter(str(logger.tensorboard_dir), purge_step=purge_step))
            self.callback(self._report_lost_points)
        no_terminal = not self._console.is_terminal
        self._progress = self.enter_context(Progress(console=self._console, transient=True, disable=no_terminal))
        self._task = self._progress.add_task("", total=total_steps, completed=resume_step or 0)

    def abandon(self, step: int) -> None:
        """Go on after `step`: what is later moves aside. -1: from the beginning."""
        if self._metrics is not None:
            self._metrics.close()
        self.event("resumed", step=step, abandoned_steps=_abandon(self.run_dir, step))
        self._open_metrics()

    def evaluated(self, step: int) -> bool:
        """Whether the metrics of `step` have an evaluation."""
        records = read_jsonl(self.run_dir / "metrics.jsonl")
        return any(r["step"] == step and any(name.startswith("eval/") for name in r) for r in records)

    @property
    def published(self) -> int:
        """The highest version that was ever published in this directory, or -1."""
        events = read_jsonl(self.run_dir / "events.jsonl")
        return max((event["version"] for event in events if event["kind"] == "publication"), default=-1)

    def _open_metrics(self) -> None:
        self._metrics = self.enter_context(_append_to(self.run_dir / "metrics.jsonl"))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step everywhere. A step may come in several parts (its evaluation is later)."""
        self._metrics.write(json_line({"step": step, "time": time.time(), **metrics}))
        self._metrics.flush()
        if self._tensorboard is not None:
            self._to_tensorboard(step, metrics)
        evaluated = any(name.startswith("eval/") for name in metrics)
        if evaluated or step % self.logger.logging_steps == 0 or step == self.total_steps:
            self._console.print(step_line(step, self.total_steps, metrics), highlight=False)
        if not evaluated:  # an evaluation may end after a later step
            self._progress.update(self._task, completed=step)

    def _to_tensorboard(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
        except Exception as error:  # a full disk under TensorBoard must not end a run: metrics.jsonl has it all
            self.lost_points += 1
            if self.lost_points == 1:
                self._console.print(f"TensorBoard lost step {step} ({error!r}); metrics.jsonl has it", markup=False)

    def event(self, kind: str, **fields: Any) -> None:
        """Append a fault, a publication, an evaluation, … to `events.jsonl`."""
        self._events.write(json_line({"time": time.time(), "kind": kind, **fields}))
        self._events.flush()

    def _report_lost_points(self) -> None:
        if self.lost_points:
            self._console.print(f"TensorBoard lost {self.lost_points} steps; metrics.jsonl has them")


def _append_to(path: Path) -> IO[str]:
    file = path.open("a", encoding="utf-8")
    # A line torn by a crash must not swallow the next one.
    if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        file.write("\n")
    return file


def _abandon(run_dir: Path, step: int) -> list[int]:
    """Move what is later than `step` to `abandoned/<time>/`; the steps moved. Safe to kill and repeat."""
    metrics = run_dir / "metrics.jsonl"
    records = list(read_jsonl(metrics))
    late = [record for record in records if record["step"] > step]
    files = [path for path in (run_dir / "rollouts").glob("step_*.parquet") if step_of(path) > step]
    if late or files:
        aside = run_dir / "abandoned" / datetime.now().strftime("%Y%m%d-%H%M%S.%f")
        (aside / "rollouts").mkdir(parents=True)
        _write(aside / "metrics.jsonl", late)
        for path in files:
            os.replace(path, aside / "rollouts" / path.name)
    # Last, so that a kill before this line leaves every abandoned step to be moved again.
    _write(metrics, [record for record in records if record["step"] <= step])
    return sorted({record["step"] for record in late} | {step_of(path) for path in files})


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    aside = path.with_name(path.name + ".new")
    with aside.open("w", encoding="utf-8") as file:
        file.writelines(json_line(record) for record in records)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
