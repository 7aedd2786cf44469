"""Prompts in, finished groups out: admission, dispatch, failures, the ledger.

`Producer.run` is one of the two long tasks of the loop; `batch` is where the learner waits for it.
The policy of *when* is pure and lives in `admission.py`; this file moves groups between states:

    prompt stream ──► in flight ──► finished (the buffer) ──► batch ──► closed
                          └───────► discarded (unusable prompt, failed rollouts, filtered) ──► closed
"""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError

from molt.config import RolloutConfig
from molt.data.prompts import PromptStream
from molt.data.rows import UnusableRow
from molt.errors import AgentError, FailureRateError, MoltError, StalledError
from molt.rollout.admission import may_start, select_batch
from molt.rollout.runner_worker import GroupResult, GroupTask, group_task
from molt.types import Group, InfraFailure, Metric, Prompt, Sample

MIN_ATTEMPTS = 50
"""Rollout attempts before a failure rate means anything."""
GRACE_S = 60.0
"""What a runner may take beyond the deadlines it enforces itself."""


def own(samples: list[list[Sample]]) -> ray.ObjectRef:
    """A reference, owned by the driver, to samples that came from a checkpoint."""
    return ray.put(samples)


class RunnerPool:
    """Dispatches groups to runners: least loaded first, again elsewhere when a runner dies or hangs.

    `spawn(name)` starts a runner process; the pool owns them and replaces the ones it loses.
    """

    def __init__(self, spawn: Callable[[str], ray.actor.ActorHandle], count: int, *, deadline_s: float, attempts: int):
        self.spawn = spawn
        self.names = itertools.count(count)
        self.runners = [spawn(f"runner{index}") for index in range(count)]
        self.deadline_s = deadline_s
        self.attempts = attempts
        self.in_flight = [0] * count

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
            try:
                async with asyncio.timeout(self.deadline_s):
                    return await result, samples
            except (TimeoutError, RayActorError):
                # Dead, or its event loop is blocked (an env that never awaits): only a new process helps.
                self._replace(index, runner)
            except asyncio.CancelledError:
                ray.cancel(result)
                raise
            finally:
                self.in_flight[index] -= 1
        raise InfraFailure("runner", f"no runner finished the group within {self.attempts} x {self.deadline_s:.0f} s")

    def _replace(self, index: int, lost: ray.actor.ActorHandle) -> None:
        if self.runners[index] is lost:  # every group it had comes here; the first replaces it
            ray.kill(lost)
            self.runners[index] = self.spawn(f"runner{next(self.names)}")


@dataclass
class FailureWindow:
    """The recent rollout attempts, failed or not."""

    limit: float
    recent: deque[str | None]
    """Reason of a failed attempt, None of a good one."""
    details: dict[str, str]

    def add(self, failures: Sequence[InfraFailure], good: bool) -> None:
        """Count one rollout's attempts. Raises as `check` does."""
        for failure in failures:
            self.details[failure.reason] = failure.detail
            self.recent.append(failure.reason)
        if good:
            self.recent.append(None)
        self.check(MIN_ATTEMPTS)

    def check(self, min_attempts: int) -> None:
        """Raise `FailureRateError` with the table of reasons when too many of at least `min_attempts` failed."""
        reasons = Counter(reason for reason in self.recent if reason)
        failed = sum(reasons.values())
        if len(self.recent) >= min_attempts and failed > self.limit * len(self.recent):
            table = "\n".join(
                f"  {count:5d}  {reason}: {self.details[reason]}" for reason, count in reasons.most_common()
            )
            raise FailureRateError(
                f"{failed} of the last {len(self.recent)} rollout attempts failed, above rollout.max_failure_rate "
                f"(={self.limit:g}). Training on would see a biased part of the task, so the run stops; nothing that "
                f"failed was trained. Mend agent or engine, then resume with --ckpt.load_enable. By reason:\n{table}"
            )


class Producer:
    """Owns every open group, from its start until it is trained and published or discarded."""

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
        self.version = 0
        self.stopping = self.ended = False
        self.position = 0
        self.open: dict[str, Group] = {}
        self.restarts: deque[Prompt] = deque()
        self.lost: list[Prompt] = []
        """Discarded because the infrastructure failed; a run that stops for it gives them another chance."""
        window = max(200, 4 * config.batch_size * config.n_samples_per_prompt)
        self.failures = FailureWindow(config.max_failure_rate, deque(maxlen=window), {})
        self.metrics: list[dict[str, Metric]] = []
        self.error: MoltError | None = None
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Start groups whenever admission allows, until the stream ends. Waits for: a free slot.

        A `MoltError` is handed to the learner at its next `batch`, between two steps, where the state of
        trainer and ledger agree and can be saved.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    while self._may_start() and (prompt := self._next_prompt()) is not None:
                        group = Group(prompt, self._order(prompt), self.version)
                        self.open[prompt.group_id] = group
                        tasks.create_task(self._fill(group))
                    if self.exhausted:
                        break
                    await self._change()
            self.failures.check(min_attempts=1)  # a short run that only failed must not end as a success
        except* MoltError as errors:
            self.error = errors.exceptions[0]
        self.ended = True
        self._notify()

    async def batch(self, batch_size: int, *, stalled_after_s: float) -> list[Group]:
        """The groups of the next training batch, oldest start first; fewer when the stream ends, [] at its end.

        Raises `StalledError` when nothing finishes for `stalled_after_s`, and what stopped `run`.
        """
        while not self.stopping:
            if self.error is not None:
                raise self.error
            if self.ended and not self.open:
                break
            selected = select_batch(
                list(self.open.values()),
                version=self.version,
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

    def close(self, groups: Sequence[Group], version: int) -> None:
        """The groups are trained and `version` is published: their slots are free."""
        for group in groups:
            del self.open[group.prompt.group_id]
        self.version = version
        self._notify()

    def stop(self) -> None:
        """The learner gets no further batch; what is open stays open, for the checkpoint."""
        self.stopping = True
        self._notify()

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

    def restore(self, ledger: dict[str, Any], finished: Sequence[Group], version: int) -> None:
        """Continue where `ledger` was written: finished groups are in the buffer, prompts in flight start again."""
        self.version, self.position = version, ledger["position"]
        self.judged, self.filtered = ledger["filter"]
        for group in finished:
            group.order = self._order(group.prompt)
            self.open[group.prompt.group_id] = group
        self.restarts = deque(self.stream[index] for index in ledger["in_flight"])

    def finished_groups(self) -> list[Group]:
        return [group for group in self._by_order() if group.finished]

    def take_metrics(self) -> list[dict[str, Metric]]:
        """`faults/*`, and what the filter did, since the last call."""
        taken, self.metrics = self.metrics, []
        return taken

    def _order(self, prompt: Prompt) -> int:
        """Its place in the stream. Prompts start in this order, and a resume cannot change it."""
        return self.stream.index(prompt.epoch, prompt.position)

    def _by_order(self) -> list[Group]:
        return sorted(self.open.values(), key=lambda group: group.order)

    def _may_start(self) -> bool:
        in_flight = sum(not group.finished for group in self.open.values())
        return may_start(
            len(self.open),
            in_flight,
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
            del self.open[group.prompt.group_id]  # which lets another one start in its place
        else:
            group.rollouts, group.samples = result.rollouts, samples
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
            del self.open[group.prompt.group_id]
            self.lost += [group.prompt] * lost
        self._notify()

    def _notify(self) -> None:
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _diagnosis(self, seconds: float) -> str:
        waiting = [g for g in self._by_order() if not g.finished]
        rows = "\n".join(f"  group {g.prompt.group_id}, started at version {g.start_version}" for g in waiting[:20])
        return (
            f"no group finished for {seconds:.0f} s while the learner waits at version {self.version}: {len(waiting)} "
            f"in flight, {len(self.open) - len(waiting)} finished. The run stops after saving; look for an env or a "
            f"grader that never returns, or raise rollout.timeout_s. In flight:\n{rows}"
        )
