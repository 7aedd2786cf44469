"""Prompts in, finished groups out: admission, dispatch, failures, the ledger.

`Producer.run` is one of the two long tasks of the loop; `batch` is where the learner waits for it.
The policy of *when* is pure and lives in `admission.py`; this file moves groups between states:

    prompt stream ──► in flight ──► finished (the buffer) ──► batch ──► closed
                          └───────► discarded (unusable prompt, failed rollouts, filtered) ──► closed
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from molt.config import RolloutConfig
from molt.data.prompts import PromptStream
from molt.errors import AgentError, FailureRateError, MoltError, StalledError, UnusableRow
from molt.rare_gc import collect_rarely
from molt.rollout.admission import Tally, may_start, select_batch
from molt.rollout.group_task import group_task
from molt.rollout.runner_pool import RunnerPool
from molt.types import Group, InfraFailure, Metric, Prompt

MIN_ATTEMPTS = 50
"""Rollout attempts before a failure rate means anything."""
STARTS = 32
"""Groups that start in one callback of the event loop."""


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
        self.stopped, self.failed = asyncio.Event(), asyncio.Event()
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
            self.error = self.error or errors.exceptions[0]
        self.ended = True
        self._notify()

    def fail(self, error: MoltError) -> None:
        """The learner is to stop with `error`, or an earlier one, between two steps."""
        self.error = self.error or error
        self.failed.set()
        self._notify()

    async def drain(self) -> None:
        """Start nothing until `resume`; returns when nothing is in flight. A deadline ends every group.

        Returns early when there is nothing to come: `stop` was called, or `batch` raises next what `run` ended with or
        `fail` was given.
        """
        self.paused = True
        while not (self.stopping or self.ended or self.failed.is_set()) and self.tally.in_flight:
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
        self.failed.clear()
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
