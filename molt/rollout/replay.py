"""Training again on the batches that an earlier run dumped (`rollout/dump.py`), without engines and agents.

A run that replays has a `Replay` where others have a `Producer`, and an `Unpublished` where others have a `Publisher`.
"""

from collections.abc import Sequence
from pathlib import Path

from molt.data.prompts import PromptStream
from molt.rollout.buffer import is_buffer
from molt.rollout.dump import batch_dir
from molt.rollout.keepers import Keepers
from molt.rollout.shutdown import Shutdown
from molt.types import EMPTY_LEDGER, Group, Ledger, Metric, Prompt


class Replay:
    """The batches of a dump, one after another. It has the methods of a `Producer` that the loop calls."""

    patience_s = 0.0
    done = False
    filter = None

    def __init__(self, folder: Path, stream: PromptStream, shutdown: Shutdown, keepers: Keepers):
        self.folder = folder
        self.keepers = keepers
        self.stream = stream
        self.shutdown = shutdown
        self.step = 0

    async def run(self) -> None:
        """Nothing is generated."""

    async def batch(self, batch_size: int, *, stalled_after_s: float) -> list[Group]:
        """The batch that step `step + 1` trained; [] after the last one. Raises the error that stops the run."""
        if self.shutdown.error is not None:
            raise self.shutdown.error
        path = batch_dir(self.folder, self.step + 1)
        if self.shutdown.requested or not is_buffer(path):
            return []
        return await self.keepers.load(path, self._prompt_at)

    def begin_again(self, groups: Sequence[Group]) -> None:
        """Arrays that are lost are read from the dump again, with the batch."""

    def close(self, groups: Sequence[Group], step: int) -> None:
        """The batch is trained and published."""
        self.step = step

    async def drain(self) -> None:
        """Nothing is in flight."""

    def resume(self) -> None:
        """Nothing was paused."""

    def ledger(self) -> Ledger:
        """A replay has no prompts in flight; where it is, the step says."""
        return EMPTY_LEDGER

    def restart(self) -> None:
        self.step = 0

    def restore(self, ledger: Ledger, finished: Sequence[Group], step: int, unscored: Sequence[Group] = ()) -> None:
        self.step = step

    def finished_groups(self) -> list[Group]:
        return []

    def unscored_groups(self) -> list[Group]:
        return []

    def take_metrics(self) -> list[dict[str, Metric]]:
        return []

    def _prompt_at(self, epoch: int, position: int) -> Prompt:
        return self.stream[self.stream.index(epoch, position)]


class Unpublished:
    """Nobody generates, so weights are not sent anywhere."""

    def forget(self) -> None:
        """There are no connections."""

    async def publish(self, version: int) -> dict[str, Metric]:
        return {}
