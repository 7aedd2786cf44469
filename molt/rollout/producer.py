"""Prompts in, finished groups out: admission, dispatch, failures, the ledger.

`Producer.run` is one of the two long tasks of the loop; `batch` is where the learner waits for it.
The policy of *when* is pure and lives in `admission.py`; this file moves groups between states:

    prompt stream ──► in flight ──► finished (the buffer) ──► batch ──► closed
                          └───────► discarded (unusable prompt, failed rollouts, filtered) ──► closed
"""

import asyncio
import itertools
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError

from molt.chat.collector import collect_rarely
from molt.config import RolloutConfig
from molt.data.prompts import PromptStream
from molt.data.rows import UnusableRow
from molt.errors import AgentError, FailureRateError, LostError, MoltError, StalledError
from molt.rollout.admission import Tally, may_start, select_batch
from molt.rollout.runner_worker import GroupResult, GroupTask, group_task
from molt.rollout.watchdog import RolloutState, table
from molt.types import Group, InfraFailure, Metric, Prompt, Sample

MIN_ATTEMPTS = 50
"""Rollout attempts before a failure rate means anything."""
GRACE_S = 60.0
"""What a runner may take beyond the deadlines it enforces itself."""
STARTS = 32
"""Groups that start in one callback of the event loop."""
LOADING_S = 300.0
"""A new runner need not answer for so long: it loads its agent."""


def own(samples: list[list[Sample]]) -> ray.ObjectRef:
    """A reference, owned by the driver, to samples that came from a checkpoint."""
    return ray.put(samples)


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
    ):
        """deadline_s: for one attempt at a group. silence_s: a runner that says nothing for so long is replaced.

        max_restarts: of one runner, without an answer in between.
        """
        self.spawn = spawn
        self.names = itertools.count()
        self.deadline_s, self.attempts, self.silence_s = deadline_s, attempts, silence_s
        self.max_restarts = max_restarts
        self.on_event: Callable[..., None] = lambda kind, **fields: None
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
            except RayActorError as error:
                self._replace(index, runner, repr(error).strip().splitlines()[-1])
            except ObjectLostError:
                continue  # its node is gone, which `states` will notice
            except asyncio.CancelledError:
                ray.cancel(result)
                raise
            finally:
                answer.cancel()  # nobody would retrieve what it raises
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
        except (TimeoutError, RayActorError) as error:
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


@dataclass
class FailureWindow:
    """The recent rollout attempts, failed or not."""

    limit: float
    recent: deque[str | None]
    """Reason of a failed attempt, None of a good one."""
    details: dict[str, str]
    failed: int = 0
    """How many of `recent` failed."""

    def add(self, failures: Sequence[InfraFailure], good: bool) -> None:
        """Count one rollout's attempts. Raises as `check` does."""
        for failure in failures:
            self.details[failure.reason] = failure.detail
            self._add(failure.reason)
        if good:
            self._add(None)
        self.check(MIN_ATTEMPTS)

    def check(self, min_attempts: int) -> None:
        """Raise `FailureRateError` with the table of reasons when too many of at least `min_attempts` failed."""
        if len(self.recent) >= min_attempts and self.failed > self.limit * len(self.recent):
            reasons = Counter(reason for reason in self.recent if reason is not None)
            table = "\n".join(
                f"  {count:5d}  {reason}: {self.details[reason]}" for reason, count in reasons.most_common()
            )
            raise FailureRateError(
                f"{self.failed} of the last {len(self.recent)} rollout attempts failed, above rollout.max_failure_rate "
                f"(={self.limit:g}). Training on would see a biased part of the task, so the run stops; nothing that "
                f"failed was trained. Mend agent or engine, then resume with --ckpt.load_enable. By reason:\n{table}"
            )

    def _add(self, reason: str | None) -> None:
        if len(self.recent) == self.recent.maxlen:
            self.failed -= self.recent[0] is not None
        self.recent.append(reason)
        self.failed += reason is not None


class Producer:
    """Owns every open group, from its start until it is trained and published or discarded."""

    NOTHING = {"position": 0, "in_flight": [], "filter": [0, 0]}
    """The ledger of a run that has not begun."""

    def __init__(
        self,
        stream: PromptStream,
        runners: RunnerPool,
        config: RolloutConfig,
        *,
        queue: int,
        max_staleness: int,
        on_event: Callable[..., None],
        keep: tuple[float, float] | None = None,
    ):
        """keep: groups whose mean score is not strictly between are discarded (dynamic filtering); None: none is."""
        self.keep, self.judged, self.filtered = keep, 0, 0
        self.stream, self.runners, self.config = stream, runners, config
        self.queue, self.max_staleness = queue, max_staleness
        self.on_event = on_event
        self.step = 0
        self.ended = self.paused = False
        self.stopped = asyncio.Event()
        self.position = 0
        self.open: dict[str, Group] = {}
        self.tally = Tally()
        """Of `open`."""
        self.restarts: deque[Prompt] = deque()
        self.lost: list[Prompt] = []
        """Discarded because the infrastructure failed; a run that stops for it gives them another chance."""
        self.failures = self._no_failures()
        self.metrics: list[dict[str, Metric]] = []
        self.error: MoltError | None = None
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Start groups whenever admission allows, until the stream ends. Waits for: a free slot.

        A `MoltError` is handed to the learner at its next `batch`, between two steps, where the state of
        trainer and ledger agree and can be saved.
        """
        collect_rarely()
        try:
            await self._fill_all()
            self.failures.check(min_attempts=1)  # a short run that only failed must not end as a success
        except* MoltError as errors:
            self.error = errors.exceptions[0]
        self.ended = True
        self._notify()

    def fail(self, error: MoltError) -> None:
        """The learner is to stop with `error` between two steps."""
        self.error = error
        self._notify()

    async def drain(self) -> None:
        """Start nothing until `resume`; returns when nothing is in flight. A deadline ends every group.

        Returns early when there is nothing to come: `stop` was called, or `run` ended with what `batch` raises next.
        """
        self.paused = True
        while not (self.stopping or self.ended) and self.tally.in_flight:
            await self._change()

    def resume(self) -> None:
        self.paused = False
        self._notify()

    @property
    def patience_s(self) -> float:
        """No group takes longer than this to finish or fail."""
        return self.runners.patience_s

    async def batch(self, batch_size: int, *, stalled_after_s: float) -> list[Group]:
        """The groups of the next training batch, oldest start first; fewer when the stream ends, [] at its end.

        Raises `StalledError` when nothing finishes for `stalled_after_s`, and what stopped `run`, or `fail` was given.
        """
        while not self.stopping:
            if self.error is not None:
                raise self.error
            if self.ended and not self.open:
                break
            selected = select_batch(
                self.open.values(),
                self.tally,
                step=self.step,
                batch_size=batch_size,
                max_staleness=self.max_staleness,
                exhausted=self.exhausted,
            )
            if selected is not None:
                return selected
            try:
                async with asyncio.timeout(stalled_after_s):
                    await self._change()
            except TimeoutError:
                raise StalledError(self._diagnosis(stalled_after_s)) from None
        return []

    def close(self, groups: Sequence[Group], step: int) -> None:
        """The groups are trained as batch `step`, and that is published: their slots are free."""
        for group in groups:
            self._leave(group)
        self.step = step
        self._notify()

    def stop(self) -> None:
        """The learner gets no further batch; what is open stays open, for the checkpoint."""
        self.stopped.set()
        self._notify()

    @property
    def stopping(self) -> bool:
        return self.stopped.is_set()

    @property
    def exhausted(self) -> bool:
        """No further group can start."""
        return not self.restarts and self.position >= len(self.stream)

    @property
    def done(self) -> bool:
        """Every prompt is trained or discarded."""
        return self.exhausted and not self.open

    def ledger(self) -> dict[str, Any]:
        """What a checkpoint holds of the prompts: the next position, and who is open or waits for a slot."""
        waiting = [group.prompt for group in self._by_order() if not group.finished] + [*self.restarts]
        if isinstance(self.error, FailureRateError):
            waiting += self.lost
        in_flight = [self._order(prompt) for prompt in waiting]
        return {"position": self.position, "in_flight": in_flight, "filter": [self.judged, self.filtered]}

    def restore(self, ledger: dict[str, Any], finished: Sequence[Group], step: int) -> None:
        """Continue where `ledger` was written: finished groups are in the buffer, prompts in flight start again.

        Whatever was open is forgotten; `run` must not be running.
        """
        self.open, self.tally = {}, Tally()
        self.lost, self.error, self.ended, self.paused = [], None, False, False
        self.failures, self.metrics = self._no_failures(), []
        self.step, self.position = step, ledger["position"]
        self.judged, self.filtered = ledger["filter"]
        for group in finished:
            group.order = self._order(group.prompt)
            self._enter(group)
        self.restarts = deque(self.stream[index] for index in ledger["in_flight"])

    def finished_groups(self) -> list[Group]:
        return [group for group in self._by_order() if group.finished]

    def take_metrics(self) -> list[dict[str, Metric]]:
        """`faults/*`, and what the filter did, since the last call."""
        taken, self.metrics = self.metrics, []
        return taken

    def _no_failures(self) -> FailureWindow:
        window = max(200, 4 * self.config.batch_size * self.config.n_samples_per_prompt)
        return FailureWindow(self.config.max_failure_rate, deque(maxlen=window), {})

    def _order(self, prompt: Prompt) -> int:
        """Its place in the stream. Prompts start in this order, and a resume cannot change it."""
        return self.stream.index(prompt.epoch, prompt.position)

    def _by_order(self) -> list[Group]:
        return sorted(self.open.values(), key=lambda group: group.order)

    def _enter(self, group: Group) -> None:
        self.open[group.prompt.group_id] = group
        self.tally.add(group)

    def _leave(self, group: Group) -> None:
        del self.open[group.prompt.group_id]
        self.tally.remove(group)

    def _may_start(self) -> bool:
        if self.paused:
            return False
        return may_start(
            len(self.open),
            self.tally.in_flight,
            batch_size=self.config.batch_size,
            queue=self.queue,
            generate_batch_size=self.config.vllm_generate_batch_size or self.config.batch_size,
        )

    def _next_prompt(self) -> Prompt | None:
        if self.restarts:
            return self.restarts.popleft()
        while self.position < len(self.stream):
            index = self.position
            self.position += 1
            try:
                return self.stream[index]
            except UnusableRow as error:
                self._discard(None, "unusable_row", str(error))
        return None

    async def _fill_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                while self._may_start() and (prompt := self._next_prompt()) is not None:
                    group = Group(prompt, self._order(prompt), self.step)
                    self._enter(group)
                    tasks.create_task(self._fill(group))
                    if len(self.open) % STARTS == 0:
                        await asyncio.sleep(0)  # thousands may start at once: others have their turn
                if self.exhausted:
                    return
                await self._change()

    async def _fill(self, group: Group) -> None:
        try:
            result, samples = await self.runners.run_group(group_task(group.prompt, self.config))
        except InfraFailure as failure:
            self._count(group, None, [failure], good=False)
            self._discard(group, failure.reason, failure.detail, lost=True)
            return
        if result.unusable:
            self._discard(group, "prompt_too_long", result.unusable)
            return
        if any(sample.media for rollout in result.rollouts for sample in rollout.samples):
            raise AgentError(
                f"group {group.prompt.group_id} would train on calls that show images: training on images is not "
                "built yet, and without them every log-prob would be another. Show the agent text, keep such calls out "
                "of training (header `x-molt-train: 0`, `ctx.exclude`), or measure with `molt eval`."
            )
        lost = None
        for rollout in result.rollouts:
            failed = isinstance(rollout.outcome, InfraFailure)
            lost = rollout.outcome if failed else lost
            attempts = [*rollout.failures, *([rollout.outcome] if failed else [])]
            self._count(group, rollout.index, attempts, good=not failed)
        if lost is not None:  # never trained with a silently smaller baseline
            self._discard(group, lost.reason, lost.detail, lost=True)
            return
        if self.keep is not None and not self._kept([rollout.outcome.score for rollout in result.rollouts]):
            self._leave(group)  # which lets another one start in its place
        else:
            group.rollouts, group.samples = result.rollouts, samples
            self.tally.finish(group)
        self._notify()

    def _kept(self, scores: Sequence[float]) -> bool:
        """Dynamic sampling, DAPO, arXiv 2503.14476: a group that all solve, or none, has no advantages."""
        (low, high), mean = self.keep, sum(scores) / len(scores)
        kept = low < mean < high
        self.judged, self.filtered = self.judged + 1, self.filtered + (not kept)
        shares = {"filtered": not kept, "all_fail": mean <= low, "all_pass": mean >= high, "unfiltered_score": mean}
        shares |= {"judged_count": 1, "filtered_count": not kept}
        self.metrics.append({f"rollout/{name}": Metric(float(value)) for name, value in shares.items()})
        return kept

    def _count(self, group: Group, rollout: int | None, failures: Sequence[InfraFailure], good: bool) -> None:
        """Failed attempts of one rollout, or of a whole group (None). Raises `FailureRateError`."""
        for failure in failures:
            self.metrics.append({f"faults/{failure.reason}": Metric(1.0)})
            self.on_event(
                "rollout_failed",
                group=group.prompt.group_id,
                rollout=rollout,
                reason=failure.reason,
                detail=failure.detail,
            )
        self.failures.add(failures, good=good)

    def _discard(self, group: Group | None, reason: str, detail: str, lost: bool = False) -> None:
        self.metrics.append({"faults/discarded_groups": Metric(1.0)})
        self.on_event("group_discarded", group=group.prompt.group_id if group else None, reason=reason, detail=detail)
        if group is not None:
            self._leave(group)
            self.lost += [group.prompt] * lost
        self._notify()

    def _notify(self) -> None:
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _diagnosis(self, seconds: float) -> str:
        waiting = [g for g in self._by_order() if not g.finished]
        rows = "\n".join(f"  group {g.prompt.group_id}, started at step {g.start_step}" for g in waiting[:20])
        return (
            f"no group finished for {seconds:.0f} s while the learner waits at step {self.step}: {len(waiting)} "
            f"in flight, {len(self.open) - len(waiting)} finished. The run stops after saving; look for an env or a "
            f"grader that never returns, or raise rollout.timeout_s. In flight:\n{rows}"
        )
