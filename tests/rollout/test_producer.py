"""The producer over a fake runner pool: admission, discards, failures, the ledger.

When a group may start and which groups make a batch is tested in test_admission.py; here it is whether
the producer does so.
"""

import asyncio
import json
from collections import Counter, deque
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.algo.advantage import ADVANTAGES
from molt.batch.plan import RankPlan, advantages, plan_batch
from molt.config import RewardConfig, RolloutConfig
from molt.errors import (
    AgentError,
    FailureRateError,
    NoProgressError,
    PublicationError,
    StalledError,
    UnusableRow,
)
from molt.rollout.failures import MIN_ATTEMPTS, FailureWindow
from molt.rollout.group_task import GroupResult
from molt.rollout.producer import STARTS, GroupFilter, Producer
from molt.rollout.replacement import LEAST_LIMIT
from molt.rollout.shutdown import Shutdown
from molt.types import (
    Group,
    InfraFailure,
    Metric,
    PolicyFailure,
    Prompt,
    ReplaceGroup,
    RolloutInfo,
    SampleInfo,
    Scored,
    Scoring,
    Unscored,
)

GOOD = Scored(1.0, 1.0)


@dataclass
class Stream:
    """`size` prompts per epoch."""

    size: int
    epochs: int = 1
    unusable: frozenset[int] = frozenset()

    def __len__(self):
        return self.size * self.epochs

    def __getitem__(self, i):
        if not 0 <= i < len(self):
            raise IndexError(i)
        if i in self.unusable:
            raise UnusableRow("whose `input` is empty")
        epoch, position = divmod(i, self.size)
        return Prompt(epoch, position, row=position, messages=None, text="x")

    def index(self, epoch, position):
        return epoch * self.size + position


def rollouts(prompt, outcomes, failures=(), cuts=()):
    """cuts: of the first rollouts; the others are complete."""
    found = []
    for i, outcome in enumerate(outcomes):
        cut = cuts[i] if i < len(cuts) else None
        found.append(RolloutInfo(prompt.group_id, i, outcome, cut, 1, (), failures=tuple(failures)))
    return found


class Runners:
    """A `RunnerPool` whose groups end when the test says so."""

    patience_s = 5.0

    def __init__(self):
        self.started: list[int] = []
        self.ends: dict[int, asyncio.Future] = {}

    async def run_group(self, task, *_):
        position = task.prompt.position
        self.started.append(position)
        self.ends[position] = asyncio.get_running_loop().create_future()
        return await self.ends[position]

    async def end(self, *positions, outcomes=(GOOD, GOOD), failures=(), cuts=()):
        """Group 0:position ends with these outcomes, one per rollout."""
        for position in positions:
            result = GroupResult(rollouts(Prompt(0, position, 0, None, "x"), outcomes, failures, cuts))
            self.ends.pop(position).set_result((result, f"samples of {position}"))
        await settle()

    async def unusable(self, position, reason):
        self.ends.pop(position).set_result((GroupResult([], unusable=reason), "nothing"))
        await settle()

    async def replace(self, position, reason):
        self.ends.pop(position).set_result((GroupResult([], replaced=ReplaceGroup(reason, "why")), "nothing"))
        await settle()

    async def fail(self, position, error):
        self.ends.pop(position).set_exception(error)
        await settle()


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


class Running:
    """A producer at work, and what it reported."""

    def __init__(
        self,
        stream,
        runners=None,
        *,
        batch_size=2,
        queue=1,
        staleness=None,
        restore=None,
        group_filter=None,
        mask_truncated=False,
        **config,
    ):
        self.runners = Runners() if runners is None else runners
        self.events: list[tuple[str, dict]] = []
        self.shutdown = Shutdown()
        self.producer = Producer(
            stream,
            self.runners,
            RolloutConfig(**{"batch_size": batch_size, "n_samples_per_prompt": 2, **config}),
            self.shutdown,
            queue=queue,
            max_staleness=queue if staleness is None else staleness,
            on_event=lambda kind, **fields: self.events.append((kind, fields)),
            group_filter=group_filter,
            reward=RewardConfig(mask_truncated=mask_truncated),
        )
        if restore:
            self.producer.restore(*restore)
        self.batch_size = batch_size

    async def __aenter__(self):
        self.task = asyncio.create_task(self.producer.run())
        await settle()
        return self

    async def __aexit__(self, *error):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def batch(self, stalled_after_s=5.0):
        return await self.producer.batch(self.batch_size, stalled_after_s=stalled_after_s)

    async def train(self):
        """One batch from start to publication; the positions it trained."""
        groups = await self.batch()
        self.producer.close(groups, self.producer.step + 1)
        await settle()
        return [group.prompt.position for group in groups]

    @property
    def discarded(self):
        return Counter(fields["reason"] for kind, fields in self.events if kind == "group_discarded")

    def count(self, name):
        found = [*self.producer.metrics, *self.producer.replacements.metrics]
        return sum(m[name].total for m in found if name in m)


def check(coroutine):
    """Run the coroutine; nothing in these tests takes long."""
    return asyncio.run(asyncio.wait_for(coroutine, 20))


class Scorers(Runners):
    """Runners whose groups are scored after they are rolled out."""

    def __init__(self):
        super().__init__()
        self.progress = {}
        self.begun = {}

    async def run_group(self, task, on_progress, begun):
        self.progress[task.prompt.position] = on_progress
        self.begun[task.prompt.position] = begun
        return await super().run_group(task)

    def rolled_out(self, *positions, sampling=()):
        """The groups wait for scores now, or (sampling) generate again."""
        for position in positions:
            waiting = rollouts(Prompt(0, position, 0, None, "x"), [Unscored("{}"), GOOD])
            self.progress[position](GroupResult(waiting, sampling=sampling), f"samples of {position}")


def test_a_group_that_waits_for_scores_holds_an_open_slot_and_no_generation_slot():
    async def main():
        async with Running(Stream(20), Scorers(), vllm_generate_batch_size=2) as run:
            assert run.runners.started == [0, 1]
            run.runners.rolled_out(0)
            await settle()
            assert run.runners.started == [0, 1, 2]  # 1 and 2 generate
            run.runners.rolled_out(1, 2)
            await settle()
            assert run.runners.started == [0, 1, 2, 3]  # (1 + 1) * 2 are open
            assert (run.producer.tally.scoring, run.producer.tally.generating) == (3, 1)
            await run.runners.end(0, 1)
            assert (run.producer.tally.scoring, run.producer.tally.in_flight) == (1, 2)
            assert await run.train() == [0, 1]
            assert run.runners.started == [0, 1, 2, 3, 4]  # 3 and 4 generate, and one more may be open
            run.runners.rolled_out(2, sampling=(0,))  # its score failed: it generates again
            assert (run.producer.tally.scoring, run.producer.tally.generating) == (0, 3)
            run.runners.rolled_out(3)
            run.runners.progress[3](GroupResult([]), None)  # its arrays are lost: it starts again
            assert (run.producer.tally.scoring, run.producer.tally.generating) == (0, 3)
            assert run.producer.open["0:3"].samples is None
            await run.runners.end(2, 3, 4)
            assert run.producer.tally.scoring == 0

    check(main())


def test_a_group_that_fails_or_is_filtered_while_it_is_scored_leaves_the_tally():
    async def main():
        async with Running(Stream(20), Scorers(), vllm_generate_batch_size=4) as run:
            run.runners.rolled_out(0, 1, 2)
            await run.runners.fail(0, InfraFailure("runner", "died"))
            await run.runners.end(1, outcomes=(GOOD, InfraFailure("scorer_exit", "gone")))
            await run.runners.unusable(2, "too long")
            assert run.discarded == {"runner": 1, "scorer_exit": 1, "prompt_too_long": 1}
            assert (run.producer.tally.scoring, run.producer.tally.in_flight) == (0, 4)

    check(main())


def test_drain_waits_for_scores_too():
    async def main():
        async with Running(Stream(20), Scorers(), vllm_generate_batch_size=4) as run:
            run.runners.rolled_out(0, 1, 2, 3)
            drained = asyncio.create_task(run.producer.drain())
            await run.runners.end(0, 1, 2)
            assert not drained.done()
            await run.runners.end(3)
            await drained

    check(main())


def test_a_group_that_waits_for_scores_is_continued_after_a_resume():
    async def main():
        async with Running(Stream(20), Scorers(), vllm_generate_batch_size=4) as run:
            await run.runners.end(1)
            run.runners.rolled_out(0, 3)
            lost = rollouts(Prompt(0, 2, 0, None, "x"), [Unscored("{}"), InfraFailure("timeout")])
            run.runners.progress[2](GroupResult(lost), "samples of 2")  # which will be discarded anyway
            ledger = run.producer.ledger()
            finished, unscored = run.producer.finished_groups(), run.producer.unscored_groups()
        assert ledger["in_flight"] == [0, 2, 3] and [group.prompt.position for group in unscored] == [0, 3]

        restore = (ledger, finished, 0, unscored)
        async with Running(Stream(20), Scorers(), vllm_generate_batch_size=4, restore=restore) as again:
            assert sorted(again.runners.started) == [0, 2, 3]
            assert again.runners.begun[2] is None
            for position in (0, 3):
                result, samples = again.runners.begun[position]
                assert [type(rollout.outcome) for rollout in result.rollouts] == [Unscored, Scored]
                assert samples == f"samples of {position}"
            assert (again.producer.tally.scoring, again.producer.tally.in_flight) == (2, 3)
            await again.runners.end(0)
            assert await again.train() == [0, 1]

    check(main())


def test_scores_that_failed_and_were_repeated_are_counted_but_no_attempts():
    async def main():
        async with Running(Stream(20), Scorers()) as run:
            scoring = Scoring(1.0, None, (InfraFailure("scorer_timeout", "late"),) * 2)
            found = [replace(each, scoring=scoring) for each in rollouts(Prompt(0, 0, 0, None, "x"), [GOOD])]
            run.runners.ends[0].set_result((GroupResult(found), "samples"))
            await settle()
            assert run.count("faults/scorer_timeout") == 2
            assert [kind for kind, _ in run.events] == ["score_failed"] * 2
            assert run.producer.failures.failed == 0 and len(run.producer.failures.recent) == 1

    check(main())


def test_admission_limits_open_groups_and_groups_in_flight():
    async def main():
        async with Running(Stream(20), vllm_generate_batch_size=3) as run:
            assert run.runners.started == [0, 1, 2]  # 3 in flight
            await run.runners.end(1)
            assert run.runners.started == [0, 1, 2, 3]  # one finished, 3 in flight, (1 + 1) * 2 open
            await run.runners.end(0, 2)
            assert run.runners.started == [0, 1, 2, 3]  # finished groups are open
            assert await run.train() == [0, 1]
            assert run.runners.started == [0, 1, 2, 3, 4, 5]

    check(main())


def test_groups_carry_what_the_learner_needs():
    async def main():
        async with Running(Stream(20)) as run:
            await run.runners.end(1, 0)
            groups = await run.batch()
            assert [(g.prompt.position, g.start_step, g.samples) for g in groups] == [
                (0, 0, "samples of 0"),
                (1, 0, "samples of 1"),
            ]
            assert [r.outcome for r in groups[0].rollouts] == [GOOD, GOOD]
            run.producer.close(groups, 1)
            await settle()
            await run.runners.end(2, 3)  # they started before the publication
            await run.runners.end(4, 5)
            assert await run.train() == [2, 3]
            assert [g.start_step for g in await run.batch()] == [1, 1]

    check(main())


def test_the_learner_waits_until_enough_groups_are_finished():
    async def main():
        async with Running(Stream(20)) as run:
            waiting = asyncio.create_task(run.batch())
            await run.runners.end(0)
            assert not waiting.done()
            await run.runners.end(1)
            assert [g.prompt.position for g in await waiting] == [0, 1]

    check(main())


def test_a_lost_rollout_discards_its_group_and_the_next_prompt_takes_its_place():
    async def main():
        async with Running(Stream(20), max_failure_rate=1.0, vllm_generate_batch_size=8) as run:
            assert run.runners.started == [0, 1, 2, 3]
            await run.runners.end(1, outcomes=(GOOD, InfraFailure("timeout", "no end")))
            assert run.runners.started == [0, 1, 2, 3, 4]
            await run.runners.end(0, 4)
            assert await run.train() == [0, 4]
            assert run.discarded == {"timeout": 1}
            assert run.count("faults/discarded_groups") == 1
            assert ("group_discarded", {"group": "0:1", "reason": "timeout", "detail": "no end"}) in run.events

    check(main())


def test_failures_are_counted_by_reason_also_those_that_a_retry_made_good():
    async def main():
        async with Running(Stream(20), max_failure_rate=1.0) as run:
            await run.runners.end(0, failures=[InfraFailure("engine", "gone"), InfraFailure("KeyError", "'x'")])
            await run.runners.end(1, outcomes=(PolicyFailure(0.0), InfraFailure("timeout")))
            await run.runners.fail(2, InfraFailure("runner", "died"))
            # Two rollouts of group 0 failed twice each before they were good.
            assert {name: run.count(f"faults/{name}") for name in ("engine", "KeyError", "timeout", "runner")} == {
                "engine": 2,
                "KeyError": 2,
                "timeout": 1,
                "runner": 1,
            }
            assert run.discarded == {"timeout": 1, "runner": 1}
            assert Counter(f["reason"] for kind, f in run.events if kind == "rollout_failed") == {
                "engine": 2,
                "KeyError": 2,
                "timeout": 1,
                "runner": 1,
            }
            taken = run.producer.take_metrics()
            assert {"faults/engine": Metric(1.0)} in taken
            assert run.producer.take_metrics() == []

    check(main())


def test_a_scheme_that_failed_is_counted_once_and_its_group_is_replaced():
    async def main():
        async with Running(Stream(20), max_failure_rate=1.0) as run:
            ended = rollouts(Prompt(0, 0, 0, None, "x"), [GOOD])
            result = GroupResult(ended, failure=InfraFailure("KeyError", "'x' at scheme.py:7"))
            run.runners.ends.pop(0).set_result((result, "nothing"))
            await settle()
            assert run.discarded == {"KeyError": 1} and run.count("faults/KeyError") == 1
            assert run.producer.failures.recent == deque([None, "KeyError"])  # one rollout had ended
            assert [prompt.position for prompt in run.producer.lost] == [0]

    check(main())


def test_a_policy_failure_is_a_result_like_any_other():
    async def main():
        async with Running(Stream(2), max_failure_rate=0.0) as run:
            await run.runners.end(0, 1, outcomes=(PolicyFailure(0.0), PolicyFailure(0.0)))
            assert await run.train() == [0, 1]
            assert not run.discarded

    check(main())


def test_too_many_failures_stop_the_run_at_the_next_batch_with_the_table_of_reasons():
    async def main():
        async with Running(Stream(100), batch_size=10, queue=0, max_failure_rate=0.5) as run:
            # 4 good and MIN_ATTEMPTS - 5 failed rollouts are too few to judge; one more failure is enough.
            few = MIN_ATTEMPTS - 5
            await run.runners.end(0, 1)
            for position in range(2, 2 + few):
                await run.runners.end(position, outcomes=[InfraFailure("engine", "gone")])
            assert run.shutdown.error is None and not run.task.done()
            waiting = asyncio.create_task(run.batch())
            await run.runners.end(2 + few, outcomes=[InfraFailure("timeout", "no end")])
            said = f"{few + 1} of the last {MIN_ATTEMPTS} rollout attempts failed, above"
            with pytest.raises(FailureRateError, match=said) as error:
                await waiting
            assert str(error.value).splitlines()[1:] == [f"  {few:5d}  engine: gone", "      1  timeout: no end"]
            assert "(=0.5)" in str(error.value) and "--ckpt.load_enable" in str(error.value)
            with pytest.raises(FailureRateError):
                await run.batch()  # and at every later one
            # Nothing is lost: what was running starts again on resume, with the group whose failure stopped the run.
            # 8 of 10 slots were running. After them come the prompts that were lost.
            assert run.producer.ledger()["in_flight"] == [*range(2 + few, 2 + few + 8), *range(2, 2 + few)]
            assert [g.prompt.position for g in run.producer.finished_groups()] == [0, 1]

    check(main())


def test_lost_prompts_are_in_the_ledger_only_of_a_run_that_stops_because_of_them():
    async def main():
        async with Running(Stream(5, unusable=frozenset({0})), max_failure_rate=0.3) as run:
            await run.runners.end(1)
            await run.runners.unusable(2, "prompt of 900 tokens leaves no room")  # no second chance changes that
            await run.runners.end(3, outcomes=(GOOD, InfraFailure("timeout")))
            assert run.discarded == {"unusable_row": 1, "prompt_too_long": 1, "timeout": 1}
            assert [prompt.position for prompt in run.producer.lost] == [3]
            assert run.producer.ledger() == {"position": 5, "in_flight": [4], "filter": [0, 0]}
            await run.runners.fail(4, InfraFailure("runner", "died"))
            assert await run.train() == [1]  # what did not fail is trained first
            with pytest.raises(FailureRateError, match="2 groups of 3 had a rollout that failed in every attempt"):
                await run.batch()
            assert run.producer.ledger() == {"position": 5, "in_flight": [3, 4], "filter": [0, 0]}

    check(main())


def test_a_short_run_with_failures_that_a_retry_made_good_is_trained_to_its_end():
    """8 good rollouts and 3 failed attempts: 3 of 11 is above the limit, of 11 attempts it means nothing."""

    async def main():
        async with Running(Stream(4)) as run:
            await run.runners.end(0, 1)
            await run.runners.end(2)
            result = GroupResult(rollouts(Prompt(0, 3, 0, None, "x"), [GOOD, GOOD]))
            retried = replace(result.rollouts[0], failures=(InfraFailure("engine"),) * 3)
            run.runners.ends.pop(3).set_result((GroupResult([retried, result.rollouts[1]]), "samples"))
            await settle()
            assert await run.train() == [0, 1] and await run.train() == [2, 3]
            assert await run.batch() == [] and run.shutdown.error is None

    check(main())


@pytest.mark.parametrize("kept", [0, 1])
def test_a_short_run_that_mostly_failed_does_not_end_as_a_success(kept):
    """Not even if the last batch is one that the learner counted on: it would ask for no further one."""

    async def main():
        async with Running(Stream(2), batch_size=4) as run:
            await run.runners.end(*range(kept))
            for position in range(kept, 2):
                await run.runners.end(position, outcomes=[InfraFailure("KeyError", "'x'")])
            if kept:
                assert await run.train() == [0]
            assert run.shutdown.failed and isinstance(run.shutdown.error, FailureRateError)
            lost = 2 - kept
            assert f"{lost} group" in str(run.shutdown.error) and "KeyError: 'x'" in str(run.shutdown.error)
            assert run.producer.ledger()["in_flight"] == list(range(kept, 2))

    check(main())


def test_a_run_that_is_to_stop_starts_no_group():
    """Its published version may be one that no engine has: a start step of it would understate the staleness."""

    async def main():
        async with Running(Stream(20), queue=0) as run:
            await run.runners.end(0, 1)
            groups = await run.batch()
            run.shutdown.fail(PublicationError("weights did not arrive"))
            run.producer.close(groups, 1)
            await settle()
            assert run.runners.started == [0, 1] and not run.producer.open

    check(main())


def test_a_rollout_that_fails_in_every_attempt_counts_once():
    window = FailureWindow(0.2, size=10)
    window.add([InfraFailure("timeout"), InfraFailure("timeout"), InfraFailure("KeyError", "'x'")], succeeded=False)
    window.add([InfraFailure("engine"), InfraFailure("engine")], succeeded=True)
    assert list(window.recent) == ["KeyError", "engine", "engine", None]


def test_a_twelfth_of_the_rollouts_that_always_fails_is_no_failure_rate_of_a_fifth():
    """11 good for each that fails three times: 1/12 is below 0.2, and 3/14 would be above."""
    window = FailureWindow(0.2, size=1000)
    for _ in range(40):
        window.add([InfraFailure("KeyError")] * 3, succeeded=False)
        for _ in range(11):
            window.add([], succeeded=True)


def test_unusable_rows_and_prompts_are_skipped_and_counted():
    async def main():
        async with Running(Stream(8, unusable=frozenset({0, 2}))) as run:
            assert run.runners.started == [1, 3]
            await run.runners.unusable(3, "prompt of 900 tokens leaves no room")
            await run.runners.end(1, 4)
            assert await run.train() == [1, 4]
            assert run.discarded == {"unusable_row": 2, "prompt_too_long": 1}
            assert run.count("faults/discarded_groups") == 3
            details = {f["detail"] for kind, f in run.events if kind == "group_discarded"}
            assert details == {"whose `input` is empty", "prompt of 900 tokens leaves no room"}

    check(main())


def test_every_group_that_is_replaced_has_a_reason_an_event_and_a_count():
    async def main():
        stream = Stream(20, unusable=frozenset({0}))
        group_filter = GroupFilter(0.0, 1.0)
        more = {"mask_truncated": True, "group_filter": group_filter, "max_failure_rate": 1.0}
        async with Running(stream, queue=3, vllm_generate_batch_size=8, **more) as run:
            assert run.runners.started == [1, 2, 3, 4, 5, 6, 7, 8]
            mixed = (GOOD, Scored(0.0, 0.0))
            await run.runners.end(1, outcomes=(GOOD, GOOD))  # both solve it
            await run.runners.end(2, outcomes=mixed, cuts=["length"])
            await run.runners.end(3, outcomes=(GOOD, InfraFailure("timeout")))
            await run.runners.unusable(4, "prompt of 900 tokens leaves no room")
            await run.runners.replace(5, "stale_task")
            await run.runners.end(6, outcomes=mixed, cuts=["turns", "agent"])  # no length limit: it is kept
            assert run.runners.started == [*range(1, 14)]  # a replacement for each of five groups
            assert run.discarded == {
                "unusable_row": 1,
                "filtered": 1,
                "too_few_left": 1,
                "timeout": 1,
                "prompt_too_long": 1,
                "stale_task": 1,
            }
            for reason, count in run.discarded.items():
                assert run.count(f"rollout/replaced_{reason}_count") == count
            assert run.count("faults/discarded_groups") == 3  # not what the policy or the agent decided
            details = {fields["reason"]: fields["detail"] for kind, fields in run.events if kind == "group_discarded"}
            assert details["filtered"] == "mean score 1" and details["stale_task"] == "why"
            assert details["too_few_left"] == "a length limit cut 1 of 2 rollouts"
            assert (run.count("rollout/judged_count"), run.count("rollout/all_pass")) == (2, 1)
            assert [group.prompt.position for group in run.producer.finished_groups()] == [6]
            assert run.producer.take_metrics() and run.producer.take_metrics() == []

    check(main())


def test_the_filter_sees_only_the_rollouts_that_no_length_limit_cut():
    async def main():
        outcomes = (Scored(0.0, 0.0), GOOD, GOOD)  # a mean of 2/3, or of 1 without the cut one
        for mask_truncated, kept in ((False, [0, 1]), (True, [1])):
            more = {"group_filter": GroupFilter(0.0, 1.0), "mask_truncated": mask_truncated, "n_samples_per_prompt": 3}
            async with Running(Stream(20), **more) as run:
                await run.runners.end(0, outcomes=outcomes, cuts=["length"])
                await run.runners.end(1, outcomes=outcomes, cuts=["turns"])
                assert [group.prompt.position for group in run.producer.finished_groups()] == kept

    check(main())


@pytest.mark.parametrize(("n", "cuts", "is_kept"), [(1, 0, True), (1, 1, False), (4, 2, True), (4, 3, False)])
def test_a_group_needs_two_rollouts_that_are_left_or_one_if_it_has_no_more(n, cuts, is_kept):
    async def main():
        async with Running(Stream(20), mask_truncated=True, n_samples_per_prompt=n) as run:
            await run.runners.end(0, outcomes=[GOOD] * n, cuts=["length"] * cuts)
            assert bool(run.producer.finished_groups()) == is_kept
            assert run.discarded == ({} if is_kept else {"too_few_left": 1})
            groups = run.producer.finished_groups()
            assert all(len(group.rollouts) == n for group in groups)  # the record is whole

    check(main())


class Endings:
    """A `RunnerPool` whose groups end at once: the position says how."""

    patience_s = 5.0

    def __init__(self, kept=()):
        self.kept = kept
        self.ended = 0

    async def run_group(self, task, *_):
        await asyncio.sleep(0)
        self.ended += 1
        score = 0.5 if task.prompt.position in self.kept else 0.0
        return GroupResult(rollouts(task.prompt, [Scored(score, score)] * 2)), None


def test_a_run_that_only_replaces_groups_warns_and_then_stops(capsys):
    async def main():
        runners = Endings()
        async with Running(Stream(1000), runners, queue=0, group_filter=GroupFilter(0.0, 1.0)) as run:
            with pytest.raises(NoProgressError) as error:
                await run.batch()
        # 200 is more than 4 times the 2 groups that may be open. The other open group had ended before anybody looked.
        assert LEAST_LIMIT <= runners.ended <= LEAST_LIMIT + 1
        assert str(error.value) == (
            "200 groups were replaced for the reason `filtered` since one was last kept for training, so nothing is "
            "learned. The last one: mean score 0. Use prompts of which the model solves some but not all, or widen "
            "--algo.dynamic_filtering_range. The run stops; resume with --ckpt.load_enable when that is fixed."
        )
        warned = capsys.readouterr().err.splitlines()
        assert len(warned) == 1 and warned[0].startswith("100 groups were replaced") and "At 200 the run" in warned[0]

    check(main())


def test_the_limit_grows_with_the_groups_that_may_be_open_and_a_kept_group_starts_the_count_anew():
    async def main():
        # 4 times (1 + 1) * 30 open groups are 240. Group 230 is kept: its neighbours may end before it.
        runners = Endings(kept={230})
        async with Running(Stream(1000), runners, batch_size=30, queue=1, group_filter=GroupFilter(0.0, 1.0)) as run:
            with pytest.raises(NoProgressError, match="240 groups were replaced"):
                await run.batch()
            assert 470 <= runners.ended <= 471 + 60

    check(main())


def test_rows_that_cannot_be_used_stop_a_run_too():
    async def main():
        async with Running(Stream(1000, unusable=frozenset(range(2, 1000))), vllm_generate_batch_size=4) as run:
            with pytest.raises(NoProgressError, match=r"200 groups .* the reason `unusable_row` .*data.input_key"):
                await run.batch()
            assert run.producer.ledger()["in_flight"] == [0, 1]

    check(main())


def test_lost_prompts_of_a_run_that_makes_no_progress_are_in_its_ledger():
    async def main():
        async with Running(Stream(300), max_failure_rate=1.0, queue=0, batch_size=1) as run:
            for position in range(LEAST_LIMIT):
                await run.runners.end(position, outcomes=(GOOD, InfraFailure("KeyError", "'x' at grader.py:3")))
            with pytest.raises(
                NoProgressError, match=r"`KeyError`.*The last one: 'x' at grader.py:3. Fix what the detail"
            ):
                await run.batch()
            assert run.producer.ledger()["in_flight"] == [*range(LEAST_LIMIT)]

    check(main())


def test_a_group_whose_arrays_are_lost_starts_again_and_the_batch_is_taken_anew():
    async def main():
        async with Running(Stream(20)) as run:
            await run.runners.end(0, 1)
            groups = await run.batch()
            assert [group.prompt.position for group in groups] == [0, 1]
            run.producer.begin_again([groups[1]])
            assert run.producer.ledger()["in_flight"] == [2, 3, 1]
            await run.runners.end(2)
            assert run.runners.started == [0, 1, 2, 3, 1]  # before new prompts, once a slot is free
            again = await run.batch()
            assert [group.prompt.position for group in again] == [0, 2]
            await run.runners.end(1)
            run.producer.close(again, 1)
            await run.runners.end(3)
            assert (await run.train()) == [1, 3]  # both started at step 0, so the order of the stream decides
            assert ("group_lost", {"group": "0:1"}) in run.events

    check(main())


def test_a_group_of_the_last_batch_that_is_lost_starts_again_although_the_stream_has_ended():
    async def main():
        async with Running(Stream(2)) as run:
            await run.runners.end(0, 1)
            groups = await run.batch()
            run.producer.begin_again(groups[:1])
            await settle()
            assert run.runners.started == [0, 1, 0] and not run.producer.ended
            await run.runners.end(0)
            assert sorted(await run.train()) == [0, 1]
            assert await run.batch() == [] and run.producer.ended

    check(main())


def test_a_group_is_finished_when_its_second_copy_is_there():
    copied = asyncio.Event()
    asked = []

    class Copies:
        async def copy(self, group_id, samples, node):
            asked.append((group_id, samples, node))
            await copied.wait()

    async def main():
        async with Running(Stream(20)) as run:
            run.producer.copies = Copies()
            await run.runners.end(0)
            assert asked == [("0:0", "samples of 0", "")] and not run.producer.finished_groups()
            copied.set()
            await settle()
            assert [group.prompt.position for group in run.producer.finished_groups()] == [0]

    check(main())


def test_the_stream_ends_with_a_smaller_batch_and_then_none():
    async def main():
        async with Running(Stream(4, unusable=frozenset({3}))) as run:
            await run.runners.end(0, 1)
            await run.runners.end(2)
            assert await run.train() == [0, 1]
            assert await run.train() == [2]
            assert await run.batch() == []
            assert run.task.done()

    check(main())


@pytest.mark.parametrize("unusable", [frozenset(), frozenset({0, 1})])
def test_a_stream_of_which_nothing_is_left_ends(unusable):
    async def main():
        async with Running(Stream(2 if unusable else 0, unusable=unusable)) as run:
            assert await run.batch() == []

    check(main())


def test_a_learner_that_already_waits_sees_the_end_of_the_stream():
    async def main():
        async with Running(Stream(1), max_failure_rate=1.0) as run:
            waiting = asyncio.create_task(run.batch())
            await run.runners.end(0, outcomes=(InfraFailure("timeout"),))
            assert await waiting == []

    check(main())


def test_stop_ends_the_wait_and_keeps_what_is_open():
    async def main():
        async with Running(Stream(20)) as run:
            await run.runners.end(1)
            waiting = asyncio.create_task(run.batch())
            await settle()
            run.shutdown.request()
            assert await waiting == []
            assert await run.batch() == []
            assert run.producer.ledger() == {"position": 3, "in_flight": [0, 2], "filter": [0, 0]}
            assert [g.prompt.position for g in run.producer.finished_groups()] == [1]

    check(main())


def test_drain_waits_for_what_is_in_flight_and_starts_nothing_until_resume():
    async def main():
        async with Running(Stream(20)) as run:
            draining = asyncio.create_task(run.producer.drain())
            await run.runners.end(0)
            assert not draining.done() and run.runners.started == [0, 1]
            await run.runners.end(1)
            assert draining.done() and run.runners.started == [0, 1]
            run.producer.resume()
            await settle()
            assert run.runners.started == [0, 1, 2, 3]

    check(main())


@pytest.mark.parametrize("how", ["stop", "error"])
def test_drain_does_not_wait_for_what_will_never_end(how):
    async def main():
        async with Running(Stream(20), max_failure_rate=0.5) as run:
            draining = asyncio.create_task(run.producer.drain())
            await settle()
            if how == "stop":
                run.shutdown.request()
            else:
                await run.runners.end(0, outcomes=[InfraFailure("engine", "gone")] * MIN_ATTEMPTS)
            await asyncio.wait_for(draining, 1)
            assert not all(group.finished for group in run.producer.open.values())
            if how == "error":
                with pytest.raises(FailureRateError):
                    await run.batch()

    check(main())


def test_silence_is_a_stall_that_says_who_is_waited_for():
    async def main():
        async with Running(Stream(20)) as run:
            await run.runners.end(1)
            with pytest.raises(StalledError, match=r"no group finished for 0 s.*2 in flight, 1 finished") as error:
                await run.batch(stalled_after_s=0.02)
            assert str(error.value).splitlines()[1:] == [
                "  group 0:0, started at step 0",
                "  group 0:2, started at step 0",
            ]

    check(main())


def test_an_error_that_is_not_ours_ends_the_producer_at_once():
    async def main():
        async with Running(Stream(20)) as run:
            await run.runners.fail(0, ZeroDivisionError("a bug"))
            assert run.task.done()
            with pytest.RaisesGroup(ZeroDivisionError):
                await run.task

    check(main())


def test_prompts_of_a_resume_that_have_not_started_yet_are_still_in_the_ledger():
    async def main():
        ledger = {"position": 6, "in_flight": [1, 3, 4], "filter": [0, 0]}
        run = Running(Stream(20), vllm_generate_batch_size=1, restore=(ledger, [], 5))
        assert run.producer.ledger() == ledger  # a second stop before the first start
        async with run:
            assert run.runners.started == [1]
            assert run.producer.ledger() == ledger
            await run.runners.end(1)
            assert run.producer.ledger() == {"position": 6, "in_flight": [3, 4], "filter": [0, 0]}

    check(main())


def test_a_resume_puts_the_buffer_before_what_starts_again():
    async def main():
        finished = [Group(Prompt(0, 4, 4, None, "x"), 17, 3, rollouts(Prompt(0, 4, 4, None, "x"), [GOOD]))]
        ledger = {"position": 7, "in_flight": [5, 6], "filter": [0, 0]}
        async with Running(Stream(20), restore=(ledger, finished, 4)) as run:
            assert run.runners.started == [5, 6]  # 2 in flight
            await run.runners.end(6)
            assert run.runners.started == [5, 6, 7]
            groups = await run.batch()
            assert [(g.prompt.position, g.start_step) for g in groups] == [(4, 3), (6, 4)]

    check(main())


class Timed:
    """A `RunnerPool` whose groups end by themselves, some of them lost."""

    patience_s = 5.0

    def __init__(self, delays, lost):
        self.delays, self.lost = delays, lost
        self.in_flight = self.most = 0

    async def run_group(self, task, *_):
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            for _ in range(self.delays[task.prompt.position % len(self.delays)]):
                await asyncio.sleep(0)
        finally:
            self.in_flight -= 1
        outcome = InfraFailure("timeout") if task.prompt.position in self.lost else GOOD
        return GroupResult(rollouts(task.prompt, [outcome])), None


@dataclass(frozen=True)
class Leg:
    """One life of a driver: `batches` until its checkpoint, then `wasted` more until it is killed."""

    batches: int
    ticks: int
    wasted: int


LEGS = st.builds(Leg, st.integers(0, 3), st.sampled_from([0, 1, 7]), st.integers(0, 2))


@settings(max_examples=150, deadline=None)
@given(
    stream=st.builds(Stream, st.integers(1, 8), st.integers(1, 2), st.frozensets(st.integers(0, 15), max_size=3)),
    delays=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    lost=st.frozensets(st.integers(0, 7), max_size=2),
    batch_size=st.integers(1, 3),
    queue=st.integers(0, 2),
    slack=st.integers(0, 1),
    in_flight=st.integers(1, 5),
    legs=st.lists(LEGS, max_size=4),
)
def test_stopped_anywhere_every_prompt_is_trained_exactly_once(
    stream, delays, lost, batch_size, queue, slack, in_flight, legs
):
    staleness = queue + slack
    trained: list[int] = []

    async def live(leg, restore):
        """Returns what a checkpoint holds, or None at the end of the stream."""
        runners = Timed(delays, lost)
        run = Running(
            stream,
            runners,
            batch_size=batch_size,
            queue=queue,
            staleness=staleness,
            restore=restore,
            vllm_generate_batch_size=in_flight,
            max_failure_rate=1.0,
        )
        producer, saved, kept = run.producer, None, None
        run.task = asyncio.create_task(producer.run())
        done = 0
        while True:
            if leg and done == leg.batches:
                for _ in range(leg.ticks):
                    await asyncio.sleep(0)
                assert len(producer.open) <= (1 + queue) * batch_size
                ledger = json.loads(json.dumps(producer.ledger()))
                saved = ledger, [replace(group) for group in producer.finished_groups()], producer.step
                kept = len(trained)
            if leg and done == leg.batches + leg.wasted:
                break
            groups = await run.batch()
            if not groups:
                break
            assert all(producer.step - g.start_step <= staleness for g in groups)
            trained.extend(stream.index(g.prompt.epoch, g.prompt.position) for g in groups)
            producer.close(groups, producer.step + 1)
            done += 1
        await run.__aexit__()
        assert runners.most <= in_flight
        if saved is None:
            return None  # the stream ended before the checkpoint was due
        del trained[kept:]  # abandoned: not in the lineage of the final weights
        return saved

    async def main():
        restore = None
        for leg in legs:
            saved = await live(leg, restore)
            if saved is None:
                return
            restore = saved
        await live(None, restore)

    check(main())
    expected = [i for i in range(len(stream)) if i not in stream.unusable and i % stream.size not in lost]
    assert sorted(trained) == expected


def test_images_are_not_trained_on_without_their_pixels():
    async def main():
        async with Running(Stream(4)) as run:
            info = replace(rollouts(Prompt(0, 0, 0, None, "x"), [GOOD])[0], samples=(SampleInfo(9, 3, 0, media=1),))
            run.runners.ends[0].set_result((GroupResult([info]), "its samples"))
            await settle()
            with pytest.raises(AgentError, match=r"group 0:0 .* training on images is not built yet"):
                await run.batch()

    asyncio.run(main())


@dataclass(frozen=True)
class Fate:
    """What becomes of a group of two: the rewards and answer lengths of its rollouts, and what the machines did."""

    rewards: tuple[float, float]
    lengths: tuple[int, int]
    retried: int = 0
    """Attempts at each rollout that failed before one was good."""
    lost: str = ""
    """`rollout`: its last one has no result; `group`: no runner finished it."""


@dataclass
class Fated:
    """A `RunnerPool` that gives each group the fate of its row."""

    fates: list[Fate]
    patience_s = 5.0

    async def run_group(self, task, *_):
        fate = self.fates[task.prompt.row]
        if fate.lost == "group":
            raise InfraFailure("runner", "died")
        outcomes = [Scored(reward, reward) for reward in fate.rewards]
        if fate.lost == "rollout":
            outcomes[-1] = InfraFailure("timeout")
        found = rollouts(task.prompt, outcomes, [InfraFailure("engine")] * fate.retried)
        samples = [(SampleInfo(length + 2, length, 0),) for length in fate.lengths]
        return GroupResult([replace(r, samples=s) for r, s in zip(found, samples, strict=True)]), None


def plans(fates: list[Fate], batch_size: int, estimator: str, aggregation: str) -> list[list[RankPlan]]:
    """Everything that decides the gradients of every batch of two ranks: advantages and token weights, by sample."""

    async def main():
        found, stream = [], Stream(len(fates))
        async with Running(stream, Fated(fates), batch_size=batch_size, queue=0, max_failure_rate=1.0) as run:
            while groups := await run.batch():
                of_groups = [group.rollouts for group in groups]
                rewards = [[r.reward for r in group] for group in of_groups]
                group_advantages = advantages(of_groups, rewards, ADVANTAGES[estimator])
                found.append(
                    plan_batch(
                        of_groups,
                        rewards=rewards,
                        group_advantages=group_advantages,
                        groups_per_step=2,
                        micro_batch_size=2,
                        max_len=64,
                        ranks=2,
                        aggregation=aggregation,
                    )
                )
                run.producer.close(groups, run.producer.step + 1)
        return found

    return asyncio.run(asyncio.wait_for(main(), 20))


PAIRS = st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 1.0]))
FATES = st.builds(Fate, PAIRS, st.tuples(st.integers(1, 9), st.integers(0, 9)))


@settings(max_examples=100)
@given(
    good=st.lists(FATES, min_size=1, max_size=7),
    retried=st.lists(st.integers(0, 2), min_size=7, max_size=7),
    lost=st.lists(st.tuples(st.integers(0, 7), FATES, st.sampled_from(["rollout", "group"])), max_size=5),
    batch_size=st.integers(2, 3),
    estimator=st.sampled_from([name for name, found in ADVANTAGES.items() if found.level == "group"]),
    aggregation=st.sampled_from(["token-mean", "seq-mean-token-mean"]),
)
def test_infrastructure_failures_change_no_gradient(good, retried, lost, batch_size, estimator, aggregation):
    """With groups that are lost at any place, and attempts that failed before a good one, every batch is what it is of
    the good groups alone: no failure is a reward, in no baseline, and takes nobody's place."""
    disturbed = [replace(fate, retried=number) for fate, number in zip(good, retried, strict=False)]
    for place, fate, how in lost:
        disturbed.insert(place, replace(fate, lost=how))
    found = plans(disturbed, batch_size, estimator, aggregation)
    assert found == plans(good, batch_size, estimator, aggregation)
    assert len(found) == -(-len(good) // batch_size)


def test_thousands_of_groups_start_in_turns():
    async def main():
        run = Running(Stream(4 * STARTS), batch_size=3 * STARTS, queue=0)
        run.task = asyncio.create_task(run.producer.run())
        starts = []
        for _ in range(4):
            await asyncio.sleep(0)
            starts.append(len(run.producer.open))
        await run.__aexit__()
        assert starts == [STARTS, 2 * STARTS, 3 * STARTS, 3 * STARTS]

    check(main())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_the_window_counts_what_it_holds(rollouts_):
    window = FailureWindow(1.0, size=10)
    for failures, good in rollouts_:
        window.add([InfraFailure("timeout")] * failures, succeeded=good)
        assert window.failed == sum(reason is not None for reason in window.recent)
