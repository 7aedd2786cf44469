"""The driver's part of a checkpoint as one value: `loop.json`, and the finished groups beside it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from molt.train.checkpoint import require_same_run
from molt.types import EMPTY_LEDGER, NO_ROLLBACK, Group, Ledger, Lineage

FILE = "loop.json"


class Best(TypedDict):
    """The best evaluation in the lineage of the weights."""

    step: int
    metric: str
    value: float


@dataclass(frozen=True)
class RunState:
    """How far a run is, between two steps."""

    step: int
    """Training batches trained."""
    total_batches: int
    """Training batches of the whole run, by its settings then."""
    lineage: Lineage = NO_ROLLBACK
    best: Best | None = None
    kl_coef: float = 0.0
    trips: tuple[int, ...] = ()
    """Steps at which the breaker tripped."""
    ledger: Ledger = field(default_factory=lambda: EMPTY_LEDGER)
    identity: dict[str, Any] = field(default_factory=dict)
    """`RunSpec.checkpoint_identity` of the run."""
    finished: tuple[Group, ...] = ()
    """The buffer: finished groups that are not trained yet."""

    def to_json(self) -> str:
        """The text of `loop.json`; the finished groups are files of their own (`rollout/buffer.py`)."""
        return json.dumps(
            {
                "step": self.step,
                "total_steps": self.total_batches,
                "rollbacks": self.lineage.rollbacks,
                "best": self.best,
                "kl_coef": self.kl_coef,
                "trips": self.trips,
                "ledger": self.ledger,
                "data": self.identity,
            }
        )


def read_state(checkpoint: Path, finished: tuple[Group, ...] = ()) -> RunState:
    """The state in a checkpoint's `loop.json`, with these finished groups."""
    saved = json.loads((checkpoint / FILE).read_text())
    rollbacks = tuple((version, step) for version, step in saved["rollbacks"])
    return RunState(
        step=saved["step"],
        total_batches=saved["total_steps"],
        lineage=Lineage(rollbacks),
        best=saved["best"],
        kl_coef=saved["kl_coef"],
        trips=tuple(saved["trips"]),
        ledger=saved["ledger"],
        identity=saved["data"],
        finished=finished,
    )


def refuse_other_run(checkpoint: Path, identity: dict[str, Any]) -> None:
    """Raise `CheckpointError` if the checkpoint was made under settings that give its places other prompts."""
    require_same_run(checkpoint, read_state(checkpoint).identity, identity)
