"""One RL run over `FakeEngine` whose driver sends itself SIGKILL at a chosen moment, for tests of resuming.

python -m tests.killed MOMENT STEP FLAGS...
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from molt.cli.args import parse
from molt.config import RLConfig
from molt.driver import run_rl
from molt.publish.publication import Publisher
from molt.records import checkpoints
from molt.records.best import BestModel
from molt.rollout.producer import Producer
from molt.run import Run
from molt.spec import resolve
from molt.train.checkpoint import checkpoint_step
from tests.runs import forbid_arrays

MOMENTS: dict[str, tuple[object, str, Callable[[int], Callable[..., bool]]]] = {
    # The batch is trained, its version neither published nor recorded.
    "trained": (Publisher, "publish", lambda step: lambda _, version: version == step),
    # Everything is recorded; the groups of the next batch are in flight.
    "recorded": (Producer, "batch", lambda step: lambda self, *_, **__: self.step == step),
    # All files of the checkpoint are written, but for the manifest.
    "saving": (checkpoints, "commit", lambda step: lambda aside: checkpoint_step(aside.with_suffix("")) == step),
    # The checkpoint of the best version is there; its model is exported, not in place, and nothing notes it.
    "best": (BestModel, "promote", lambda step: lambda self: self.best["step"] == step),
    # All is done but the final export.
    "ending": (Run, "export", lambda step: lambda run, path: run.step == step),
}


def kill_at(moment: str, step: int) -> None:
    """SIGKILL to this process when the function behind `moment` is called for `step`."""
    owner, name, at = MOMENTS[moment]
    original, now = getattr(owner, name), at(step)

    def watched(*args, **kwargs):
        if now(*args, **kwargs):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, watched)


def engine_worker() -> Any:
    """`FakeEngineWorker`, or what the environment names as `module:attribute`."""
    name = os.environ.get("MOLT_TEST_ENGINE", "tests.fakes:FakeEngineWorker")
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


if __name__ == "__main__":
    forbid_arrays()
    kill_at(sys.argv[1], int(sys.argv[2]))
    run_rl(resolve(parse(RLConfig, sys.argv[3:], prog="test")), engine_worker())
