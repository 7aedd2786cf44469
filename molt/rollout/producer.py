"""Prompts in, finished groups out: admission, dispatch, failures, the ledger.

`Producer.run` is one of the two long tasks of the loop; `batch` is where the learner waits for it.
The policy of *when* is pure and lives in `admission.py`; this file moves groups between states:

    prompt stream ──► generating ──► scoring ──► finished (the buffer) ──► batch ──► closed
                          └─────────────┴──────► replaced, for a reason (`replacement.py`) ──► closed

Both generating and scoring groups are in flight; without a scorer there are none of the latter.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from molt.batch.masking import fewest_left, takes_part
from molt.config import RewardConfig, RolloutConfig
from molt.data.prompts import PromptStream
from molt.errors import (
    AgentError,
    FailureRateError,
    MoltError,
    NoProgressError,
    StalledError,
    UnusableRow,
    first_error,
)
from molt.rare_gc import collect_rarely
from molt.rollout.admission import Tally, may_start, select_batch
from molt.rollout.failures import MIN_WINDOW, FailureWindow
from molt.rollout.group_task import GroupResult, GroupTask, group_task
from molt.rollout.replacement import (
    FILTERED,
    TOO_FEW_LEFT,
    UNUSABLE_ROW,
    Replacement,
    Replacements,
    of_failure,
    of_user,
)
from molt.rollout.shutdown import Shutdown
from molt.types import EMPTY_LEDGER, PROMPT_TOO_LONG, Group, InfraFailure, Ledger, Metric, OnEvent, Prompt, RolloutInfo

STARTS = 32
"""Groups that start in one callback of the event loop."""
SHOWN_GROUPS = 20
"""Groups in flight that the message of a stalled run lists."""


class OnProgress(Protocol):
    """Told when a group is past generation, when a rollout of it is sampled anew after that, and when all is lost."""

    def __call__(self, result: GroupResult, samples: Any, /) -> None: ...


class Runners(Protocol):
    """The runners as the producer sees them."""

    @property
    def patience_s(self) -> float: ...
    async def run_group(
        self, task: GroupTask, on_progress: OnProgress, begun: tuple[GroupResult, Any] | None
    ) -> tuple[GroupResult, Any]: ...


class Copies(Protocol):
    """Where second copies of finished groups go, as the producer sees it."""

    async def copy(self, group_id: str, samples: Any, node: str) -> None: ...


class GroupFilter:
    """Dynamic sampling (DAPO, arXiv 2503.14476): a group that all rollouts solve, or none, has no advantages.

    A group is kept when `low < mean(score) < high`.
    """

    def __init__(self, low: float, high: float):
        self.low = low
        self.high = high
        self.judged = 0
        """Groups that were looked at."""
        self.filtered = 0
        """Groups that were not kept."""

    def keeps(self, scores: Sequence[float]) -> tuple[bool, dict[str, Metric]]:
        """Whether the group with these scores is kept, and its `rollout/*` metrics."""
        mean = sum(scores) / len(scores)
        kept = self.low < mean < self.high
        self.judged += 1
        if not kept:
            self.filtered += 1
        numbers = {
            "filtered": not kept,
            "all_fail": mean <= self.low,
            "all_pass": mean >= self.high,
            "unfiltered_score": mean,
            "judged_count": 1,
            "filtered_count": not kept,
        }
        metrics = {f"rollout/{name}": Metric(float(number)) for name, number in numbers.items()}
        return kept, metrics


class Producer:
    """Owns every open group, from its start until it is trained and published or discarded."""

    def __init__(
        self,
        stream: PromptStream,
        runners: Runners,
        config: RolloutConfig,
        shutdown: Shutdown,
        *,
        queue: int,
        max_staleness: int,
        on_event: OnEvent,
        group_filter: GroupFilter | None = None,
        copies: Copies | None = None,
        reward: RewardConfig | None = None,
    ):
        """queue: `train.async_queue_size`. group_filter: None without dynamic filtering. copies: None makes none.

        reward: says which rollouts take part in training; None: all.
        """
        self.stream = stream
        self.runners = runners
        self.config = config
        self.shutdown = shutdown
        self.queue = queue
        self.max_staleness = max_staleness
        self.on_event = on_event
        self.filter = group_filter
        self.copies = copies
        self.reward = reward or RewardConfig()
        self.replacements = Replacements(most_open=(1 + queue) * config.batch_size, on_event=on_event)
        self.step = 0
        """Batches trained and published."""
        self.ended = False
        """`run` has returned: no further group will come."""
        self.paused = False
        self.position = 0
        """The next place in the stream."""
        self.open: dict[str, Group] = {}
        self.tally = Tally()
        """Counts of `open`."""
        self.restarts: deque[Prompt] = deque()
        """Prompts that a checkpoint had in flight: they start before new ones."""
        self.lost: list[Prompt] = []
        """Discarded because the infrastructure failed; a run that stops for it gives them another chance."""
        self.complete = 0
        """Groups of which every rollout had a result, since the start or the last resume."""
        self.failures = self._new_window()
        self.metrics: list[dict[str, Metric]] = []
        self._changed = asyncio.Event()
        shutdown.call_on_change(self._notify)

    async def run(self) -> None:
        """Start groups whenever admission allows, until the stream ends. Waits for: a free slot.

        A `MoltError` goes to `shutdown`: the learner raises it between two steps, where the state of trainer and
        ledger agree and can be saved.
        """
        collect_rarely()
        try:
            await self._fill_all()
        except* MoltError as errors:
            self.shutdown.end_of_groups(first_error(errors))
        self.ended = True
        self._notify()

    async def drain(self) -> None:
        """Start nothing until `resume`; returns when nothing is in flight. A deadline ends every group.

        Returns early when the run is to stop, or when no group will come any more.
        """
        self.paused = True
        while self.tally.in_flight and not self.ended and not self.shutdown.immediate.is_set():
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

        Returns [] when a signal asks for the end. Raises the error that stops the run, and `StalledError` when nothing
        finishes for `stalled_after_s`.
        """
        while not self.shutdown.requested:
            if self.shutdown.error is not None:
                raise self.shutdown.error
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
        if self.done:
            self._check_lost()
        self._notify()

    def begin_again(self, groups: Sequence[Group]) -> None:
        """These finished groups went with their node before they were trained: they are rolled out anew."""
        for group in groups:
            self.on_event("group_lost", group=group.prompt.group_id)
            self._leave(group)
            self.restarts.append(group.prompt)
        self._notify()

    @property
    def exhausted(self) -> bool:
        """No further group can start."""
        return not self.restarts and self.position >= len(self.stream)

    @property
    def done(self) -> bool:
        """Every prompt is trained or discarded."""
        return self.exhausted and not self.open

    def ledger(self) -> Ledger:
        """What a checkpoint holds of the prompts: the next position, and which are open or wait for a slot."""
        waiting = [group.prompt for group in self._by_order() if not group.finished]
        waiting.extend(self.restarts)
        if isinstance(self.shutdown.error, FailureRateError | NoProgressError):
            waiting.extend(self.lost)
        counts = [0, 0]
        if self.filter is not None:
            counts = [self.filter.judged, self.filter.filtered]
        return {
            "position": self.position,
            "in_flight": [self._order(prompt) for prompt in waiting],
            "filter": counts,
        }

    def restart(self) -> None:
        """Forget everything and start at the first prompt; `run` must not be running."""
        self.restore(EMPTY_LEDGER, [], step=0)

    def restore(self, ledger: Ledger, finished: Sequence[Group], step: int, unscored: Sequence[Group] = ()) -> None:
        """Continue where `ledger` was written: finished groups are in the buffer, prompts in flight start again.

        unscored: groups in flight that are past generation; only their scores are computed. Whatever was open is
        forgotten; `run` must not be running.
        """
        self.open = {}
        self.tally = Tally()
        self.lost = []
        self.complete = len(finished)
        self.failures = self._new_window()
        self.replacements.forget()
        self.metrics = []
        self.ended = False
        self.paused = False
        self.step = step
        self.position = ledger["position"]
        if self.filter is not None:
            self.filter.judged, self.filter.filtered = ledger["filter"]
        for group in (*finished, *unscored):
            group.order = self._order(group.prompt)
            self._enter(group)
        past_generation = {group.order for group in unscored}
        again = [index for index in ledger["in_flight"] if index not in past_generation]
        self.restarts = deque(self.stream[index] for index in again)

    def finished_groups(self) -> list[Group]:
        """The buffer, in the order of the stream."""
        return [group for group in self._by_order() if group.finished]

    def unscored_groups(self) -> list[Group]:
        """The groups of which nothing but scores is missing, in the order of the stream."""
        groups = []
        for group in self._by_order():
            if group.scoring and not any(rollout.failed for rollout in group.unscored):
                groups.append(replace(group))  # as it is now: a checkpoint is written while it goes on
        return groups

    def take_metrics(self) -> list[dict[str, Metric]]:
        """`faults/*`, and those of replaced groups and the filter, since the last call."""
        taken = self.metrics + self.replacements.take_metrics()
        self.metrics = []
        return taken

    def _new_window(self) -> FailureWindow:
        rollouts_per_batch = self.config.batch_size * self.config.n_samples_per_prompt
        return FailureWindow(self.config.max_failure_rate, size=max(MIN_WINDOW, 4 * rollouts_per_batch))

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

    def _check_lost(self) -> None:
        """At the end of the stream: a short run that mostly failed must not end as a success.

        Only then, so that what did not fail is trained first.
        """
        try:
            self.failures.check_lost(lost=len(self.lost), complete=self.complete)
        except FailureRateError as error:
            self.shutdown.fail(error)

    def _may_start(self) -> bool:
        # The version of a run that is to stop may be one that no engine has: a start step of it would be a lie.
        if self.paused or self.shutdown.immediate.is_set():
            return False
        return may_start(
            len(self.open),
            self.tally.generating,
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
                self.replacements.add(None, Replacement(UNUSABLE_ROW, str(error), is_fault=True))
                self._notify()
        return None

    async def _fill_all(self) -> None:
        """Start every prompt of the stream. The groups in flight are tasks of this one."""
        async with asyncio.TaskGroup() as tasks:
            for group in self._by_order():
                if group.scoring:
                    tasks.create_task(self._fill(group))
            while True:
                await self._start_groups(tasks)
                if self.done:  # until then a finished group may be lost, and starts again
                    self._check_lost()
                    return
                await self._change()

    async def _start_groups(self, tasks: asyncio.TaskGroup) -> None:
        """Start as many groups as admission allows now."""
        while self._may_start():
            prompt = self._next_prompt()
            if prompt is None:
                return
            group = Group(prompt, self._order(prompt), self.step)
            self._enter(group)
            tasks.create_task(self._fill(group))
            if len(self.open) % STARTS == 0:
                await asyncio.sleep(0)  # thousands may start at once: other tasks have their turn

    async def _fill(self, group: Group) -> None:
        """Roll out one group, and put it into the buffer or replace it."""
        begun = (GroupResult(group.unscored), group.samples) if group.scoring else None
        on_progress = partial(self._past_generation, group)
        try:
            result, samples = await self.runners.run_group(group_task(group.prompt, self.config), on_progress, begun)
        except InfraFailure as failure:
            self._count(group, None, [failure], succeeded=False)
            self._lose(group, failure)
            return
        if result.unusable:
            self._replace(group, Replacement(PROMPT_TOO_LONG, result.unusable, is_fault=True))
            return
        if result.replaced is not None:
            self._replace(group, of_user(result.replaced))
            return
        _refuse_images(group, result)
        failure = self._count_all(group, result)
        if failure is not None:  # never trained with a silently smaller baseline
            self._lose(group, failure)
            return
        self.complete += 1
        replacement = self._why_not_trained(result.rollouts)
        if replacement is not None:
            self._replace(group, replacement)
            return
        if self.copies is not None:
            await self.copies.copy(group.prompt.group_id, samples, result.node)
        self._set_unscored(group, [])
        group.rollouts = result.rollouts
        group.samples = samples
        self.tally.finish(group)
        self.replacements.kept()
        self._notify()

    def _past_generation(self, group: Group, result: GroupResult, samples: Any) -> None:
        """The group waits for scores, and takes no generation slot; or it generates again. samples: what it has."""
        group.samples = samples
        self._set_unscored(group, [] if result.sampling else result.rollouts)

    def _set_unscored(self, group: Group, rollouts: list[RolloutInfo]) -> None:
        before = group.scoring
        group.unscored = rollouts
        if group.scoring != before:
            self.tally.scoring += 1 if group.scoring else -1
            self._notify()

    def _why_not_trained(self, rollouts: Sequence[RolloutInfo]) -> Replacement | None:
        """Why nothing could be learned from these rollouts, all of which have a reward; None if something can."""
        scores = [rollout.score for rollout in rollouts if takes_part(rollout, self.reward)]
        if len(scores) < fewest_left(len(rollouts)):
            detail = f"a length limit cut {len(rollouts) - len(scores)} of {len(rollouts)} rollouts"
            return Replacement(TOO_FEW_LEFT, detail)
        if self.filter is None:
            return None
        kept, metrics = self.filter.keeps(scores)
        self.metrics.append(metrics)
        if kept:
            return None
        return Replacement(FILTERED, f"mean score {metrics['rollout/unfiltered_score'].total:g}")

    def _count_all(self, group: Group, result: GroupResult) -> InfraFailure | None:
        """Count the attempts of all rollouts; why one, or the group, never succeeded. Raises `FailureRateError`."""
        lost = None
        for rollout in result.rollouts:
            attempts = list(rollout.failures)
            if isinstance(rollout.outcome, InfraFailure):
                lost = rollout.outcome
                attempts.append(rollout.outcome)
            if rollout.scoring is not None:
                self._report_failures("score_failed", group, rollout.index, rollout.scoring.failures)
            self._count(group, rollout.index, attempts, succeeded=not rollout.failed)
        if result.failure is not None:
            lost = result.failure
            self._count(group, None, [lost], succeeded=False)
        return lost

    def _count(self, group: Group, rollout: int | None, failures: Sequence[InfraFailure], *, succeeded: bool) -> None:
        """Failed attempts of one rollout, or of a whole group (None). Raises `FailureRateError`."""
        self._report_failures("rollout_failed", group, rollout, failures)
        self.failures.add(failures, succeeded=succeeded)

    def _report_failures(self, kind: str, group: Group, rollout: int | None, failures: Sequence[InfraFailure]) -> None:
        for failure in failures:
            self.metrics.append({f"faults/{failure.reason}": Metric(1.0)})
            self.on_event(
                kind,
                group=group.prompt.group_id,
                rollout=rollout,
                reason=failure.reason,
                detail=failure.detail,
            )

    def _lose(self, group: Group, failure: InfraFailure) -> None:
        """The infrastructure failed for the group; a run that stops for that repeats it when it is resumed."""
        self.lost.append(group.prompt)
        self._replace(group, of_failure(failure))

    def _replace(self, group: Group, replacement: Replacement) -> None:
        """The group is not trained; another one may start in its place. Raises `NoProgressError`."""
        self._leave(group)
        self.replacements.add(group.prompt.group_id, replacement)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _diagnosis(self, seconds: float) -> str:
        in_flight = [group for group in self._by_order() if not group.finished]
        table = "\n".join(_row(group) for group in in_flight[:SHOWN_GROUPS])
        finished = len(self.open) - len(in_flight)
        return (
            f"no group finished for {seconds:.0f} s while the learner waits at step {self.step}: {len(in_flight)} in "
            f"flight, {finished} finished. The run stops after saving; look for an env or a grader that never returns, "
            f"or raise rollout.timeout_s. In flight:\n{table}"
        )


def _row(group: Group) -> str:
    """A group in flight, for a table."""
    row = f"  group {group.prompt.group_id}, started at step {group.start_step}"
    if group.scoring:
        row += ", waits for its scores"
    return row


def _refuse_images(group: Group, result: GroupResult) -> None:
    for rollout in result.rollouts:
        if any(sample.media for sample in rollout.samples):
            raise AgentError(
                f"group {group.prompt.group_id} would train on calls that show images: training on images is not "
                "built yet, and without them every log-prob would be another. Show the agent text, keep such calls out "
                "of training (header `x-molt-train: 0`, `ctx.exclude`), or measure with `molt eval`."
            )
