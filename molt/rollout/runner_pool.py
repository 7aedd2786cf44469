"""Runners as the driver sees them: who gets a group, and what happens when one dies or hangs."""

import asyncio
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ObjectLostError

from molt.errors import LostError
from molt.rollout.handles import DEAD, ignore_event
from molt.rollout.runner_worker import GroupResult, GroupTask
from molt.rollout.watchdog import RolloutState, table
from molt.types import InfraFailure, Sample

GRACE_S = 60.0
"""What a runner may take beyond the deadlines it enforces itself."""
LOADING_S = 300.0
"""A new runner need not answer for so long: it loads its agent."""


def own(samples: list[list[Sample]]) -> ray.ObjectRef:
    """A reference, owned by the driver, to samples that came from a checkpoint."""
    return ray.put(samples)


def _retrieve(answer: asyncio.Future) -> None:
    """Nobody asks what an abandoned answer raises, which asyncio would print."""
    if not answer.cancelled():
        answer.exception()


@dataclass(frozen=True)
class Dispatch:
    """A group that a runner has."""

    runner: ray.actor.ActorHandle
    since: float
    """As of `time.monotonic`."""
    again: asyncio.Future
    """Done when it is to begin again."""


class RunnerPool:
    """Dispatches groups to runners: least loaded first, again elsewhere when a runner dies or hangs.

    `spawn(name)` starts a runner process; the pool owns them and replaces the ones it loses.
    """

    def __init__(
        self,
        spawn: Callable[[str], ray.actor.ActorHandle],
        count: int,
        *,
        deadline_s: float,
        attempts: int,
        silence_s: float = 600.0,
        max_restarts: int = 3,
        on_event: Callable[..., None] = ignore_event,
    ):
        """deadline_s: for one attempt at a group. silence_s: a runner that says nothing for so long is replaced.

        max_restarts: of one runner, without an answer in between.
        """
        self.spawn = spawn
        self.names = itertools.count()
        self.deadline_s, self.attempts, self.silence_s = deadline_s, attempts, silence_s
        self.max_restarts = max_restarts
        self.on_event = on_event
        self._seen: dict[Any, tuple[float, list[RolloutState] | None]] = {}
        """By runner, when it was started or last answered, and what it said then; None: it never answered."""
        self.runners = [self._spawn() for _ in range(count)]
        self.in_flight = [0] * count
        self._in_vain = [0] * count
        """Replacements of each runner since one of it last answered."""
        self._open: dict[str, Dispatch] = {}
        """By group in flight, where it is."""
        self._lag_s = 0.0

    async def ready(self) -> None:
        """Returns when every runner has loaded its agent; raises what its constructor raised."""
        await asyncio.gather(*(runner.ready.remote() for runner in self.runners))
        self._seen.update({runner: (time.monotonic(), []) for runner in self.runners})

    @property
    def patience_s(self) -> float:
        """No group takes longer than this to finish or fail."""
        return self.deadline_s * self.attempts + GRACE_S

    async def run_group(self, task: GroupTask) -> tuple[GroupResult, ray.ObjectRef]:
        """The light result, and a reference to the samples. Raises `InfraFailure("runner")`."""
        for _ in range(self.attempts):
            index = min(range(len(self.runners)), key=self.in_flight.__getitem__)
            runner = self.runners[index]
            self.in_flight[index] += 1
            result, samples = runner.run_group.options(num_returns=2).remote(task)
            # The samples are copied to this node, so that a finished group does not go with the node of its runner.
            answer, again = asyncio.gather(result, samples), asyncio.get_running_loop().create_future()
            self._open[task.prompt.group_id] = Dispatch(runner, time.monotonic(), again)
            try:
                await asyncio.wait((answer, again), timeout=self.deadline_s, return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    found, _ = answer.result()
                    self._in_vain[index] = 0
                    return found, samples
                if again.done():
                    ray.cancel(result)
                else:  # its event loop is blocked (an env that never awaits): only a new process helps
                    self._replace(index, runner, f"no end of a group within {self.deadline_s:.0f} s")
            except DEAD as error:
                self._replace(index, runner, repr(error).strip().splitlines()[-1])
            except ObjectLostError:
                continue  # its node is gone, which `states` will notice
            except asyncio.CancelledError:
                ray.cancel(result)
                raise
            finally:
                answer.add_done_callback(_retrieve)
                answer.cancel()
                self.in_flight[index] -= 1
                del self._open[task.prompt.group_id]
        raise InfraFailure("runner", f"no runner finished the group in {self.attempts} attempts")

    def again(self, group_ids: set[str]) -> None:
        """Begin these groups again, which counts as an attempt at each."""
        for group_id in group_ids & self._open.keys():
            if not self._open[group_id].again.done():
                self._open[group_id].again.set_result(None)

    async def states(self) -> list[RolloutState]:
        """What every rollout does that somebody waits for. A runner that is dead, or does not answer, is replaced."""
        found = await asyncio.gather(*map(self._states_of, self.runners))
        # An agent that does not let itself be cancelled goes on for nobody.
        return [state for states in found for state in states if state.group_id in self._open]

    def take_lag_s(self) -> float:
        """The worst lag of a runner's event loop since the last call."""
        worst, self._lag_s = self._lag_s, 0.0
        return worst

    async def _states_of(self, runner: ray.actor.ActorHandle) -> list[RolloutState]:
        try:
            async with asyncio.timeout(self.silence_s):
                states, lag_s = await runner.states.remote()
        except (TimeoutError, *DEAD) as error:
            since, said = self._seen.get(runner, (0.0, []))
            if isinstance(error, TimeoutError) and said is None and time.monotonic() - since < LOADING_S:
                return []
            silent = f"no answer within train.watchdog_s (={self.silence_s:g})"
            reason = silent if isinstance(error, TimeoutError) else repr(error).strip().splitlines()[-1]
            if runner in self.runners:
                self._replace(self.runners.index(runner), runner, reason)
            return []
        self._seen[runner] = time.monotonic(), states
        if runner in self.runners:
            self._in_vain[self.runners.index(runner)] = 0
        self._lag_s = max(self._lag_s, lag_s)
        return states

    def _spawn(self) -> ray.actor.ActorHandle:
        runner = self.spawn(f"runner{next(self.names)}")
        self._seen[runner] = time.monotonic(), None
        return runner

    def _replace(self, index: int, lost: ray.actor.ActorHandle, reason: str) -> None:
        if self.runners[index] is lost:  # every group it had comes here; the first replaces it
            states = self._unheard_of(lost, index) + (self._seen.pop(lost)[1] or [])
            print(f"runner {index} is replaced: {reason}\n{table(states)}", file=sys.stderr)
            self.on_event("runner_lost", runner=index, in_flight=self.in_flight[index], reason=reason)
            ray.kill(lost)
            self._in_vain[index] += 1
            if self._in_vain[index] > self.max_restarts:
                raise LostError(
                    f"runner {index} was replaced {self.max_restarts} times in a row (train.max_restarts) and never "
                    f"answered: the run stops. The last one: {reason}. Mend what its output says (a lack of memory?), "
                    "then resume with --ckpt.load_enable."
                )
            self.runners[index] = self._spawn()

    def _unheard_of(self, runner: ray.actor.ActorHandle, index: int) -> list[RolloutState]:
        """The groups that a runner has and did not speak of when it last answered."""
        known = {state.group_id for state in self._seen.get(runner, (0.0, None))[1] or []}
        ages = {
            group_id: time.monotonic() - sent.since
            for group_id, sent in self._open.items()
            if sent.runner is runner and group_id not in known
        }
        return [RolloutState(group_id, 0, f"runner{index}", "runner", 0, age, age) for group_id, age in ages.items()]
