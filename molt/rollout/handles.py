"""Typed handles of engines and runners: actors in other processes, and how a call on a dead one fails."""

from collections.abc import Sequence
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import numpy as np
from ray import ObjectRef
from ray.exceptions import OutOfMemoryError, RayActorError

from molt.agents.loop_lag import Block
from molt.publish.proof import Receipt
from molt.report.rollouts import StoredGroup
from molt.rollout.engine_worker import Sampling
from molt.rollout.group_task import GroupResult, GroupTask
from molt.rollout.watchdog import LoopTimes, RolloutState
from molt.types import Media, Turn

DEAD = (RayActorError, OutOfMemoryError)
"""What a call raises when its process is gone. Ray itself kills a process when the node runs out of memory."""
HEARTBEAT_S = 1.0
"""Between two health checks of a process."""
ANSWER_S = 5.0
"""An engine that does not answer a health check within this time gets no request."""

SamplesRef = ObjectRef
"""A reference to the samples of a group, `list[list[Sample]]` by rollout and segment."""
Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")


class RemoteMethod(Protocol[Parameters, Answer]):
    """A method of an actor: `remote` sends the call, and awaiting the reference gives its answer."""

    def remote(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> "ObjectRef[Answer]": ...


class GenerateMethod(Protocol):
    """`Engine.generate`, called from another process."""

    def remote(
        self, request_id: str, prompt_ids: list[int], sampling: Sampling, media: Sequence[Media] = ()
    ) -> "ObjectRef[Turn]": ...


class EngineHandle(Protocol):
    """An `Engine` in another process. A restarted engine keeps its handle."""

    @property
    def generate(self) -> GenerateMethod: ...
    @property
    def complete(self) -> RemoteMethod[[str, list[int], Sampling], list[int]]: ...
    @property
    def logprobs(self) -> RemoteMethod[[list[list[int]]], list[np.ndarray]]: ...
    @property
    def start(self) -> RemoteMethod[[], None]: ...
    @property
    def commit(self) -> RemoteMethod[[int], list[Receipt]]: ...
    @property
    def resume(self) -> RemoteMethod[[], None]: ...
    @property
    def alive(self) -> RemoteMethod[[], bool]: ...


class RunGroupCall(Protocol):
    """`AgentHost.run_group`, whose two values come as two references."""

    def remote(
        self, task: GroupTask, begun: GroupResult | None = None, samples: "SamplesRef | tuple[()]" = (), /
    ) -> "tuple[ObjectRef[GroupResult], SamplesRef]": ...


class RunGroupMethod(Protocol):
    """`AgentHost.run_group`, called from another process."""

    def options(self, *, num_returns: int) -> RunGroupCall: ...


class RunnerHandle(Protocol):
    """An `AgentHost` in another process."""

    @property
    def ready(self) -> RemoteMethod[[], None]: ...
    @property
    def states(self) -> RemoteMethod[[], tuple[list[RolloutState], LoopTimes]]: ...
    @property
    def blocks(self) -> RemoteMethod[[], list[Block]]: ...
    @property
    def loop_times(self) -> RemoteMethod[[], LoopTimes]: ...
    @property
    def run_group(self) -> RunGroupMethod: ...
    @property
    def score_group(self) -> RemoteMethod[[GroupTask, GroupResult, SamplesRef], GroupResult]: ...


class ReadArraysCall(Protocol):
    """`Keeper.read_arrays`: a reference to the infos of all groups, then one to the arrays of each."""

    def remote(self, directory: Path) -> "list[ObjectRef]": ...


class ReadArraysMethod(Protocol):
    """`Keeper.read_arrays`, called from another process."""

    def options(self, *, num_returns: int) -> ReadArraysCall: ...


class KeeperHandle(Protocol):
    """A `Keeper` in another process."""

    @property
    def load_tokenizer(self) -> RemoteMethod[[], None]: ...
    @property
    def hold(self) -> RemoteMethod[[str, SamplesRef], None]: ...
    @property
    def release(self) -> RemoteMethod[[list[str]], None]: ...
    @property
    def write_arrays(self) -> RemoteMethod[[Path, list[SamplesRef]], list[int]]: ...
    @property
    def write_rollouts(self) -> RemoteMethod[[Path, int, list[StoredGroup], list[SamplesRef], int], list[int]]: ...
    @property
    def read_arrays(self) -> ReadArraysMethod: ...


def last_line(error: Exception) -> str:
    """The last line of an error's `repr`: the cause, without the traceback of the other process."""
    return repr(error).strip().splitlines()[-1]


def ignore_event(kind: str, **fields: object) -> None:
    """The event sink of a caller that keeps no log."""
