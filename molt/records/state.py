"""The driver's part of a checkpoint as one value: `loop.json`, and the finished groups beside it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict

from molt.checkpoint_files import read_json, to_json, with_defaults
from molt.train.checkpoint import checkpoint_step, require_same_rows, require_same_run
from molt.types import EMPTY_LEDGER, NO_ROLLBACK, Group, Json, Ledger, Lineage

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
    total_batches: int | None
    """Training batches of the whole run, by its settings then; None: an old checkpoint does not tell."""
    lineage: Lineage = NO_ROLLBACK
    best: Best | None = None
    kl_coef: float = 0.0
    trips: tuple[int, ...] = ()
    """Steps at which the breaker tripped."""
    ledger: Ledger = field(default_factory=lambda: EMPTY_LEDGER)
    identity: Json = field(default_factory=dict)
    """`RunSpec.checkpoint_identity` of the run."""
    rows: Json = field(default_factory=dict)
    """`RunSpec.rows` of the run."""
    finished: tuple[Group, ...] = ()
    """The buffer: finished groups that are not trained yet."""
    unscored: tuple[Group, ...] = ()
    """Groups in flight of which nothing but scores is missing."""

    def without(self, lost: Sequence[int]) -> "RunState":
        """The state in which some finished groups, by index, are in flight instead: their arrays are lost."""
        again = [self.finished[index].order for index in lost]
        finished = [group for index, group in enumerate(self.finished) if index not in lost]
        ledger: Ledger = {**self.ledger, "in_flight": sorted([*self.ledger["in_flight"], *again])}
        return replace(self, ledger=ledger, finished=tuple(finished))

    def without_unscored(self, lost: Sequence[int]) -> "RunState":
        """The state in which some unscored groups, by index, start again: their arrays are lost."""
        unscored = [group for index, group in enumerate(self.unscored) if index not in lost]
        return replace(self, unscored=tuple(unscored))  # all of them are in flight in the ledger

    def to_json(self) -> str:
        """The text of `loop.json`; the groups are files of their own (`rollout/buffer.py`)."""
        return to_json(
            {
                "step": self.step,
                "total_steps": self.total_batches,
                "rollbacks": self.lineage.rollbacks,
                "best": self.best,
                "kl_coef": self.kl_coef,
                "trips": self.trips,
                "ledger": self.ledger,
                "data": self.identity,
                "rows": self.rows,
            }
        )


def read_state(
    checkpoint: Path,
    finished: Sequence[Group],
    places: Sequence[int],
    batch_size: int,
    unscored: Sequence[Group] = (),
) -> RunState:
    """The state in a checkpoint, with these finished and unscored groups. Raises `CheckpointError` for a newer format.

    places: of the finished groups in the prompt stream. batch_size: `rollout.batch_size`. They stand in for a position
    that an old checkpoint does not have.
    """
    path = checkpoint / FILE
    saved = read_json(path)
    step = checkpoint_step(checkpoint)
    ledger = EMPTY_LEDGER
    if not saved["data"].get("replay"):  # a replay has none
        ledger = complete_ledger(saved["ledger"], step * batch_size, places, path)
    rollbacks = tuple((version, at_step) for version, at_step in saved["rollbacks"])
    return RunState(
        step=step,
        total_batches=saved["total_steps"],
        lineage=Lineage(rollbacks),
        best=complete_best(saved["best"], path),
        kl_coef=saved["kl_coef"],
        trips=tuple(saved["trips"]),
        ledger=ledger,
        identity=saved["data"],
        rows=saved["rows"],
        finished=tuple(finished),
        unscored=tuple(unscored),
    )


def best_in_checkpoint(checkpoint: Path) -> Best | None:
    """The best evaluation before a checkpoint was saved."""
    path = checkpoint / FILE
    return complete_best(read_json(path)["best"], path)


def refuse_other_run(checkpoint: Path, identity: Json, rows: Json, dataset: str) -> None:
    """Raise `CheckpointError` if the checkpoint was made under settings, or with rows, that give its places others.

    identity, rows: of the present run. dataset: `data.prompt_dataset` and its value, for the message.
    """
    saved = read_json(checkpoint / FILE)
    require_same_run(checkpoint, saved["data"], identity)
    require_same_rows(checkpoint, saved["rows"], rows, dataset)


def read_best(path: Path) -> Best | None:
    """The best evaluation in `best.json`; None where there is none, or where a part of it is missing."""
    if not path.exists():
        return None
    return complete_best(read_json(path), path)


def complete_best(saved: Json | None, path: Path) -> Best | None:
    """A best evaluation as saved in `path`, or None where a part of it is missing."""
    if saved is None:
        return None
    best = with_defaults(saved, "best.json", path)
    if None in best.values():
        return None
    return {"step": best["step"], "metric": best["metric"], "value": best["value"]}


def complete_ledger(saved: Json, trained: int, places: Sequence[int], path: Path) -> Ledger:
    """The ledger of a checkpoint. Where the next position is missing, it is counted from what the ledger should hold.

    trained: groups trained up to the checkpoint. places: of the finished groups in the prompt stream.
    """
    ledger = with_defaults(saved, "loop.json ledger", path)
    position = ledger["position"]
    in_flight = ledger["in_flight"]
    if position is None:
        started = [*places, *in_flight]
        behind_all_started = max((place + 1 for place in started), default=0)
        position = max(trained + len(started), behind_all_started)
    return {"position": position, "in_flight": in_flight, "filter": ledger["filter"]}
