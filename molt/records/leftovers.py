"""What an earlier run left in an output directory: a run, or nothing that a new one would overwrite."""

import shutil

from molt.config import CkptConfig
from molt.report.sinks import read_jsonl

UNTRAINED = ("step_000000", "step_000000.tmp")
"""A checkpoint of the initial weights: as it is written, and while it is."""
BEST_FILE = "best.json"


def holds_run(ckpt: CkptConfig) -> bool:
    """Whether a training batch was logged or saved. A run that failed before its first leaves nothing of value."""
    records = read_jsonl(ckpt.run_dir / "metrics.jsonl")
    has_batch = any(record.get("step") != 0 for record in records)
    names = {path.name for path in ckpt.checkpoints.glob("*")}
    return has_batch or bool(names - {*UNTRAINED, BEST_FILE})


def remove_untrained(ckpt: CkptConfig) -> None:
    """Remove what a run left that failed before its first training batch: a resume would take it for the new run's.

    `events.jsonl` stays. Does nothing to a directory that holds a run.
    """
    if holds_run(ckpt):
        return
    (ckpt.run_dir / "metrics.jsonl").unlink(missing_ok=True)
    best = ckpt.checkpoints / BEST_FILE
    if best.exists():
        best.unlink()
        shutil.rmtree(ckpt.output_dir / "best", ignore_errors=True)
    for name in UNTRAINED:
        shutil.rmtree(ckpt.checkpoints / name, ignore_errors=True)
