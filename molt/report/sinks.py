"""Where the numbers of a run go: its directory, the console, TensorBoard.

`metrics.jsonl` and `rollouts/` hold the lineage of the final weights alone: steps that a resume
abandons move to `abandoned/`. `events.jsonl` keeps everything.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Protocol

from rich.progress import Progress

from molt.config import LoggerConfig
from molt.report.console import run_console, step_line
from molt.report.rollouts import step_of
from molt.types import Json


def read_jsonl(path: Path) -> Iterator[Json]:
    """The objects of a file; a line torn by a crash is dropped, a missing file is empty."""
    if not path.exists():
        return
    for line in path.read_text(errors="replace").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def json_line(record: Json) -> str:
    """One line of valid JSON: non-finite numbers become null, which JSON has no other word for."""
    text = json.dumps(record, default=_to_json)
    finite = json.loads(text, parse_constant=_null)
    return json.dumps(finite) + "\n"


def _to_json(value: Any) -> Any:
    """numpy numbers and 0-d tensors as numbers, everything else as text."""
    if hasattr(value, "item"):
        return value.item()
    return str(value)


def _null(constant: str) -> None:
    """For `NaN`, `Infinity` and `-Infinity`."""
    return None


class _TensorBoard(Protocol):
    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None: ...


class RunLog(ExitStack):
    """Owns a run directory and its open files. Use as a context manager, or call `close`."""

    def __init__(
        self,
        run_dir: Path,
        logger: LoggerConfig,
        header: str,
        total_steps: int | None,
        resume_step: int | None = None,
    ):
        """resume_step: the step that the run goes on after; None: a new run."""
        super().__init__()
        self.run_dir = run_dir
        self.logger = logger
        self.total_steps = total_steps
        self.lost_points = 0
        """Steps that TensorBoard did not take."""
        self.abandoned_steps: list[int] = []
        """Steps after the checkpoint of the last resume: they moved aside and are trained again."""
        self._console = run_console()
        self._console.print(header, markup=False, highlight=False)

        run_dir.mkdir(parents=True, exist_ok=True)
        self._events = self.enter_context(_append_to(run_dir / "events.jsonl"))
        if resume_step is not None:
            self._move_later_steps(resume_step)
        self._metrics = self._open_metrics()

        self._tensorboard: _TensorBoard | None = None
        if logger.tensorboard_dir is not None:
            self._tensorboard = self._open_tensorboard(logger.tensorboard_dir, resume_step)
            self.callback(self._report_lost_points)

        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = self.enter_context(Progress(console=self._console, transient=True))
            self._task = self._progress.add_task("", total=total_steps, completed=resume_step or 0)

    def _open_metrics(self) -> IO[str]:
        return self.enter_context(_append_to(self.run_dir / "metrics.jsonl"))

    def _open_tensorboard(self, folder: Path, resume_step: int | None) -> _TensorBoard:
        from torch.utils.tensorboard import SummaryWriter  # slow, and most runs do without

        purge_step = None
        if resume_step is not None:
            purge_step = resume_step + 1
        return self.enter_context(SummaryWriter(str(folder), purge_step=purge_step))

    def abandon(self, step: int) -> None:
        """Go on after `step`: later steps move aside. -1: from the beginning."""
        self._metrics.close()
        self._move_later_steps(step)
        self._metrics = self._open_metrics()

    def _move_later_steps(self, step: int) -> None:
        self.abandoned_steps = _abandon(self.run_dir, step)
        self.event("resumed", step=step, abandoned_steps=self.abandoned_steps)

    def evaluated(self, step: int) -> bool:
        """Whether the metrics of `step` have an evaluation."""
        for record in read_jsonl(self.run_dir / "metrics.jsonl"):
            if record["step"] == step and _has_evaluation(record):
                return True
        return False

    @property
    def published(self) -> int:
        """The highest version that was ever published in this directory, or -1."""
        highest = -1
        for event in read_jsonl(self.run_dir / "events.jsonl"):
            if event["kind"] == "publication":
                highest = max(highest, event["version"])
        return highest

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step everywhere. A step may come in several parts (its evaluation is later)."""
        record = {"step": step, "time": time.time(), **metrics}
        self._metrics.write(json_line(record))
        self._metrics.flush()

        if self._tensorboard is not None:
            self._to_tensorboard(self._tensorboard, step, metrics)

        has_evaluation = _has_evaluation(metrics)
        is_due = step % self.logger.logging_steps == 0 or step == self.total_steps
        if has_evaluation or is_due:
            self._console.print(step_line(step, self.total_steps, metrics), highlight=False)

        # An evaluation may end after a later step.
        if self._progress is not None and not has_evaluation:
            self._progress.update(self._task, completed=step)

    def _to_tensorboard(self, tensorboard: _TensorBoard, step: int, metrics: Mapping[str, float]) -> None:
        try:
            for name, value in metrics.items():
                tensorboard.add_scalar(name, value, step)
        except Exception as error:  # a full disk under TensorBoard must not end a run: metrics.jsonl has it all
            self.lost_points += 1
            if self.lost_points == 1:
                self._console.print(f"TensorBoard lost step {step} ({error!r}); metrics.jsonl has it", markup=False)

    def event(self, kind: str, **fields: Any) -> None:
        """Append a fault, a publication, an evaluation, … to `events.jsonl`."""
        record = {"time": time.time(), "kind": kind, **fields}
        self._events.write(json_line(record))
        self._events.flush()

    def _report_lost_points(self) -> None:
        if self.lost_points:
            self._console.print(f"TensorBoard lost {self.lost_points} steps; metrics.jsonl has them")


def _has_evaluation(metrics: Mapping[str, object]) -> bool:
    return any(name.startswith("eval/") for name in metrics)


def _append_to(path: Path) -> IO[str]:
    file = path.open("a", encoding="utf-8")
    # A line torn by a crash must not swallow the next one.
    if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        file.write("\n")
    return file


def _abandon(run_dir: Path, step: int) -> list[int]:
    """Move the steps after `step` to `abandoned/<time>/`, and return them. Safe to kill and repeat."""
    metrics = run_dir / "metrics.jsonl"
    kept = []
    late = []
    for record in read_jsonl(metrics):
        if record["step"] > step:
            late.append(record)
        else:
            kept.append(record)
    files = [path for path in (run_dir / "rollouts").glob("step_*.parquet") if step_of(path) > step]

    if late or files:
        aside = run_dir / "abandoned" / datetime.now().strftime("%Y%m%d-%H%M%S.%f")
        (aside / "rollouts").mkdir(parents=True)
        _write(aside / "metrics.jsonl", late)
        for path in files:
            os.replace(path, aside / "rollouts" / path.name)

    # Last, so that a kill before this line leaves every abandoned step to be moved again.
    _write(metrics, kept)

    steps = {record["step"] for record in late}
    steps.update(step_of(path) for path in files)
    return sorted(steps)


def _write(path: Path, records: list[Json]) -> None:
    aside = path.with_name(path.name + ".new")
    with aside.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json_line(record))
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
