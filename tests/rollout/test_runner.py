"""A runner without its process: groups, retries, deadlines, seeds; over fake engines.

What is faked is the seam to the engine actors, `engine.generate.remote(...)`.
"""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.config import PromptDataConfig, RewardConfig, RolloutConfig
from molt.errors import EngineError, LostError
from molt.rollout.agent_host import AgentHost, RunnerSettings, longest_s
from molt.rollout.engine_pool import MAX_ATTEMPTS, EnginePool
from molt.rollout.engine_worker import Sampling
from molt.rollout.group_task import GroupTask
from molt.rollout.model_calls import RolloutKey, seed_of
from molt.rollout.runner_pool import RunnerPool
from molt.rollout.runner_worker import RunnerWorker
from molt.rollout.watchdog import LoopTimes, RolloutState
from molt.types import InfraFailure, PolicyFailure, Prompt, ReplaceGroup, Scored
from tests.streams import turn_from
from tests.tiny import END_ID

AGENT = """
import asyncio
import sys
from molt.agents import Env, PolicyFailure, ReplaceGroup, Result, StepEnvRunner
from molt.types import InfraFailure


class Flaky(InfraFailure):
    def __init__(self):
        super().__init__("sandbox", "no answer from the sandbox")


class TimedOut(BaseException):
    pass


class Stale(ReplaceGroup):
    def __init__(self):
        super().__init__("stale_task", "its image is gone")


class Faulty(Env):
    failed = 0

    async def reset(self, state):
        self.label = state["label"]
        await self.hang("reset")
        return state

    async def close(self):
        await self.hang("close")

    async def exits(self):
        await asyncio.sleep(0)
        sys.exit(1)

    async def hang(self, where):
        if self.label and self.label.startswith("hang in ") and where in self.label:
            await asyncio.sleep(60)

    async def step(self, state):
        what = state["label"]
        await self.hang("step")
        if what == "hang":
            await asyncio.sleep(60)
        if what == "hang with a limit of its own":
            await asyncio.wait_for(asyncio.sleep(60), 0.001)
        if what == "sometimes" and Faulty.failed < 2:
            Faulty.failed += 1
            raise Flaky()
        if what == "awaits what it cancelled" or (what == "the first does" and not Faulty.failed):
            Faulty.failed += 1
            other = asyncio.ensure_future(asyncio.sleep(60))
            other.cancel()
            await other
        if what == "always":
            raise KeyError("grader")
        if what == "exits" or (what == "the first exits" and not Faulty.failed):
            Faulty.failed += 1
            sys.exit(1)
        if what == "time limit":
            raise TimedOut("2 s")
        if what == "exits in a task":
            await asyncio.gather(asyncio.sleep(0), self.exits())
        if what == "exits in a thread":
            await asyncio.to_thread(sys.exit, 1)
        if what == "nonsense":
            return 1.0
        if what == "nan":
            return Result(float("nan"))
        if what == "reject":
            raise PolicyFailure(-1.0, "rejected")
        if what == "another prompt":
            raise Stale()
        if what == "two turns" and state["turn"] == 0:
            return Result(0.0, "more", terminated=False)
        return Result(1.0, info={"turn": state["turn"]})


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Faulty)
"""


class FakeEngine:
    """An engine actor's handle: answers `ab<end>`, or fails."""

    def __init__(self, fails=0, holds=False):
        self.calls: list[tuple[list[int], Sampling]] = []
        self.ids: list[str] = []
        self.fails, self.holds = fails, holds
        self.generate = SimpleNamespace(remote=self._generate)
        self.alive = SimpleNamespace(remote=self._alive)

    async def _alive(self):
        return True

    async def _generate(self, request_id, prompt_ids, sampling, media=()):
        self.ids.append(request_id)
        self.calls.append((list(prompt_ids), sampling))
        await asyncio.sleep(0)
        if self.fails:
            self.fails -= 1
            raise EngineError("engine is dead")
        while self.holds:
            await asyncio.sleep(0)
        sampled = np.array([50, 51, END_ID][: sampling.max_tokens], np.int32)
        n = len(sampled)
        finish = "stop" if n == 3 else "length"
        return turn_from(
            np.array(prompt_ids, np.int32), sampled, np.full(n, -1.0, np.float32), np.zeros(n, np.int32), finish
        )


@pytest.fixture
def host(model_dir, tmp_path):
    """Builds a host of the agent above: `host(engines, **settings)`."""
    (tmp_path / "agent.py").write_text(AGENT)

    def build(*engines, **settings):
        rollout = RolloutConfig(timeout_s=settings.pop("timeout_s", 5.0), max_retries=settings.pop("max_retries", 2))
        data = PromptDataConfig(max_len=64, **settings)
        agent = str(tmp_path / "agent.py")
        return AgentHost(RunnerSettings(agent, model_dir, data, rollout, seed=1), engines, "runner0")

    return build


def task(label=None, n=3, text="say", position=0, **sampling):
    prompt = Prompt(0, position, 0, messages=None, text=text, label=label)
    return GroupTask(prompt, n, **{"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_new_tokens": None} | sampling)


def run_group(host, *args, **kwargs):
    return asyncio.run(host.run_group(task(*args, **kwargs)))


def test_the_shape_of_a_group(host):
    engine = FakeEngine()
    result, samples = run_group(host(engine), "two turns")
    assert result.unusable is None and [r.index for r in result.rollouts] == [0, 1, 2]
    assert len(samples) == 3 and [len(segments) for segments in samples] == [1, 1, 1]
    for rollout, (sample,) in zip(result.rollouts, samples, strict=True):
        assert (rollout.group_id, rollout.outcome, rollout.turns) == ("0:0", Scored(1.0, 1.0), 2)
        assert rollout.metrics == {"turn": 1.0} and not rollout.truncated and not rollout.failures
        # say + ab<end> + more + ab<end>: 3 + 3 + 4 + 3 tokens, 6 of them sampled
        assert [(s.tokens, s.trained_tokens, s.oldest_version) for s in rollout.samples] == [(13, 6, 0)]
        assert sample.mask.tolist() == [False] * 3 + [True] * 3 + [False] * 4 + [True] * 3
        assert rollout.generated_tokens == 6 and rollout.duration_s > 0
    assert {len(ids) for ids, _ in engine.calls} == {3, 10}


def test_the_distribution_that_is_asked_for(host):
    engine = FakeEngine()
    run_group(host(engine), n=1, max_new_tokens=7)
    ((_, sampling),) = engine.calls
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.7, 0.9, 5, 7)
    assert sampling.stop_token_ids == (END_ID,)


def test_seeds_are_never_equal_within_a_group_and_the_same_in_the_next_run(host):
    def seeds():
        engine = FakeEngine()
        run_group(host(engine), "two turns", n=8)
        return [sampling.seed for _, sampling in engine.calls]

    first = seeds()
    assert len(set(first)) == len(first) == 16  # 8 rollouts x 2 turns
    assert sorted(first) == sorted(seeds())
    assert all(0 <= seed < 2**63 for seed in first)


@settings(deadline=None)
@given(st.sets(st.tuples(*[st.integers(-1, 1000)] * 5), max_size=50))
def test_seeds_are_equal_only_for_equal_parts(parts):
    assert len({seed_of(*p) for p in parts}) == len(parts)


def test_a_failed_attempt_is_made_again_and_remembered(host):
    result, samples = run_group(host(FakeEngine()), "sometimes", n=2)
    assert [r.outcome for r in result.rollouts] == [Scored(1.0, 1.0)] * 2
    failures = [f for r in result.rollouts for f in r.failures]
    # Of the plain class: the driver cannot unpickle one that the user's file defines.
    assert [(type(f), f.reason, f.detail) for f in failures] == [
        (InfraFailure, "sandbox", "no answer from the sandbox")
    ] * 2
    assert all(len(segments) == 1 for segments in samples)


def test_a_retry_samples_anew_and_a_group_that_starts_again_does_not(host):
    """Three attempts at one rollout, then the same group on another runner, as after a dead one or a resume."""

    def seeds():
        engine = FakeEngine()
        run_group(host(engine), "always", n=1)
        return [sampling.seed for _, sampling in engine.calls]

    first = seeds()
    assert len(set(first)) == len(first) == 3
    assert seeds() == first
    key = RolloutKey(train_seed=1, epoch=0, position=0, index=0)
    assert first == [replace(key, attempt=attempt).call_seed(0) for attempt in range(3)]
    engine = FakeEngine()
    run_group(host(engine), n=1)
    assert [sampling.seed for _, sampling in engine.calls] == first[:1]


@pytest.mark.parametrize(
    ("what", "reason", "detail"),
    [
        ("always", "KeyError", "'grader' at "),
        ("nonsense", "AgentError", "returned a float"),
        ("nan", "reward_not_finite", "reward nan"),
        ("hang", "timeout", "no end within rollout.timeout_s (=0.05)"),
        ("hang with a limit of its own", "TimeoutError", "agent.py:"),
        ("awaits what it cancelled", "CancelledError", "agent.py:55"),
        ("exits", "SystemExit", "1 at "),
        ("exits in a task", "SystemExit", "agent.py:"),
        ("exits in a thread", "SystemExit", "agent.py:"),
        ("time limit", "TimedOut", "2 s at "),
    ],
)
def test_a_rollout_that_fails_for_good_has_no_reward_and_no_samples(host, what, reason, detail):
    engine = FakeEngine()
    result, samples = run_group(host(engine, timeout_s=0.05 if what == "hang" else 5.0), what, n=1)
    (rollout,) = result.rollouts
    assert isinstance(rollout.outcome, InfraFailure) and rollout.outcome.reason == reason
    assert detail in rollout.outcome.detail
    assert [f.reason for f in rollout.failures] == [reason] * 2  # and the third attempt is the outcome
    assert samples == [[]] and rollout.samples == () and rollout.turns == 0
    assert len(engine.calls) == 3


def test_a_wrong_result_names_the_line_of_the_user_and_none_of_molts(host, tmp_path):
    result, _ = run_group(host(FakeEngine(), max_retries=0), "nonsense", n=1)
    detail = result.rollouts[0].outcome.detail
    line = AGENT.splitlines().index("    async def step(self, state):") + 1
    assert detail.startswith(f"Faulty.step ({tmp_path / 'agent.py'}:{line}) returned a float")
    assert "/molt/" not in detail


@pytest.mark.parametrize("what", ["hang in reset and close", "hang in step and close", "hang in close"])
def test_an_env_that_does_not_close_either_ends_soon_after_the_deadline(host, monkeypatch, what):
    monkeypatch.setattr("molt.agents.step_runner.CLOSE_S", 0.2)
    alone = what == "hang in close"  # then there is no deadline but that of `close`
    started = time.monotonic()
    result, samples = run_group(host(FakeEngine(), timeout_s=30 if alone else 0.2, max_retries=0), what, n=2)
    assert time.monotonic() - started < 5
    assert [r.outcome.reason for r in result.rollouts] == ["TimeoutError" if alone else "timeout"] * 2
    assert all(isinstance(r.outcome, InfraFailure) for r in result.rollouts) and samples == [[], []]


@pytest.mark.parametrize("what", ["the first does", "the first exits"])
def test_a_cancellation_or_exit_that_leaks_out_of_an_agent_leaves_its_siblings_alone(host, what):
    result, samples = run_group(host(FakeEngine(), max_retries=0), what, n=3)
    assert sorted(type(r.outcome).__name__ for r in result.rollouts) == ["InfraFailure", "Scored", "Scored"]
    assert sorted(len(segments) for segments in samples) == [0, 1, 1]


def test_a_blocked_event_loop_is_measured_from_the_first_look_on(host):
    """Whoever starts the runner: those that replace others, too."""

    async def main():
        hosted = host(FakeEngine())
        await hosted.states()
        await asyncio.sleep(0.1)  # it measures
        time.sleep(0.5)
        await asyncio.sleep(0.1)
        return (await hosted.states())[1]

    times = asyncio.run(main())
    assert times.lag_s > 0.3 and times.blocked_s > 0.3


def test_a_runner_is_given_what_its_own_limits_add_up_to():
    # two attempts of 180 s, and 30 s each to close
    assert longest_s(RolloutConfig(timeout_s=180.0, max_retries=1), RewardConfig()) == 420.0


def test_a_group_that_is_cancelled_ends_and_makes_no_further_attempt(host):
    engine = FakeEngine()

    async def main():
        hosted = host(engine, timeout_s=30)
        group = asyncio.create_task(hosted.run_group(task("hang")))
        while len(engine.calls) < 3 or any(hosted.pool.in_flight):  # until all of them are in `step`
            await asyncio.sleep(0)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(group, 5)
        assert len(engine.calls) == 3

    asyncio.run(main())


def test_no_retries(host):
    result, _ = run_group(host(FakeEngine(), max_retries=0), "always", n=1)
    assert result.rollouts[0].failures == () and isinstance(result.rollouts[0].outcome, InfraFailure)


def test_a_policy_failure_is_not_made_again(host):
    engine = FakeEngine()
    result, samples = run_group(host(engine), "reject", n=1)
    outcome = result.rollouts[0].outcome
    assert type(outcome) is PolicyFailure and (outcome.reward, outcome.reason) == (-1.0, "rejected")
    assert len(engine.calls) == 1 and len(samples[0]) == 1


def test_an_agent_that_wants_another_prompt_is_not_asked_again(host):
    engine = FakeEngine()
    result, samples = run_group(host(engine), "another prompt", n=3)
    # Of the plain class: the driver cannot unpickle one that the user's file defines.
    assert type(result.replaced) is ReplaceGroup
    assert (result.replaced.reason, result.replaced.detail) == ("stale_task", "its image is gone")
    assert result.rollouts == [] and samples == [] and len(engine.calls) == 3


def test_a_prompt_without_room_for_an_answer_is_unusable(host):
    engine = FakeEngine()
    result, samples = run_group(host(engine), text="x" * 64)
    assert result.unusable == "prompt of 64 tokens leaves no room in data.max_len (=64)"
    assert result.rollouts == [] and samples == [] and not engine.calls
    result, _ = run_group(host(engine), text="x" * 63)
    assert result.unusable is None and all(r.cut == "length" for r in result.rollouts)  # one token fits


def test_a_prompt_that_the_template_rejects_is_unusable(host):
    prompt = Prompt(0, 0, 0, messages=[{"role": "user", "content": None}], text=None)
    group = GroupTask(prompt, 1, 1.0, 1.0, -1, None)
    result, _ = asyncio.run(host(FakeEngine(), apply_chat_template=True).run_group(group))
    assert "rejected by the chat template" in result.unusable


def test_a_dead_engine_looks_idle_and_is_still_left_alone():
    dead, alive = FakeEngine(fails=99), FakeEngine()
    pool = EnginePool([dead, alive], "r")
    sampling = Sampling(1.0, 1.0, -1, 3, 0, ())

    async def main():
        for turn in range(3):  # the rollout moves, and stays where it moved to
            assert (await pool.generate("a", [1, 2], sampling, 5.0)).token_ids.tolist() == [50, 51, END_ID], turn
        assert (len(dead.calls), len(alive.calls)) == (1, 3)
        pool.forget("a")

    asyncio.run(main())
    assert len(set(dead.ids + alive.ids)) == 4 and pool.in_flight == [0, 0]


def test_when_every_engine_fails_the_rollout_fails_and_says_why():
    pool = EnginePool([FakeEngine(fails=99), FakeEngine(fails=99)], "r")
    with pytest.raises(InfraFailure) as failure:
        asyncio.run(pool.generate("a", [1], Sampling(1.0, 1.0, -1, 3, 0, ()), 5.0))
    assert failure.value.reason == "engine"
    for part in (f"{MAX_ATTEMPTS} attempts failed", "engine 0: EngineError('engine is dead')", "engine 1: "):
        assert part in failure.value.detail


def test_new_rollouts_go_to_the_engine_with_the_fewest_calls_and_stay_there():
    engines = [FakeEngine(holds=True), FakeEngine(holds=True)]
    pool = EnginePool(engines, "r")
    sampling = Sampling(1.0, 1.0, -1, 3, 0, ())

    async def main():
        calls = []
        for name in "abcd":
            calls.append(asyncio.create_task(pool.generate(name, [1], sampling, 5.0)))
            await asyncio.sleep(0)
        assert pool.in_flight == [2, 2]
        calls.append(asyncio.create_task(pool.generate("a", [1], sampling, 5.0)))
        await asyncio.sleep(0)
        assert pool.in_flight == [3, 2]
        for engine in engines:
            engine.holds = False
        await asyncio.gather(*calls)
        assert pool.in_flight == [0, 0]

    asyncio.run(main())


@ray.remote
class Waiting:
    """A runner whose group never ends."""

    started = cancelled = 0

    async def run_group(self, task):
        self.started += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def seen(self):
        return self.started, self.cancelled


@pytest.mark.ray
def test_a_group_that_nobody_waits_for_is_cancelled_in_its_runner_too(ray_session):
    async def main():
        pool = RunnerPool(lambda name: Waiting.options(num_cpus=0).remote(), 1, deadline_s=60, attempts=1)
        (runner,) = pool.runners

        async def until(started, cancelled):
            async with asyncio.timeout(60):
                while await runner.seen.remote() != (started, cancelled):
                    await asyncio.sleep(0.02)

        group = asyncio.create_task(pool.run_group(task()))
        await until(1, 0)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        await until(1, 1)
        assert pool.in_flight == [0] and pool.runners == [runner]
        ray.kill(runner)

    asyncio.run(main())


@pytest.mark.ray
def test_a_runner_that_never_answers_is_not_replaced_for_ever(ray_session):
    @ray.remote(num_cpus=0)
    class Stillborn:
        def __init__(self):
            raise MemoryError("no room")

        async def states(self): ...

    async def main():
        pool = RunnerPool(lambda name: Stillborn.remote(), 1, deadline_s=60, attempts=1, max_restarts=2)
        for _ in range(2):
            assert await pool.states() == []
        with pytest.raises(LostError, match=r"replaced 2 times in a row \(train.max_restarts\).*no room"):
            await pool.states()

    asyncio.run(main())


@pytest.mark.ray
def test_what_nobody_waits_for_any_more_is_not_in_flight(ray_session):
    """An agent that swallows its cancellation would else look like a run in which nothing moves."""

    @ray.remote(num_cpus=0)
    class Deaf:
        async def states(self):
            return [RolloutState(group, 0, "runner0", "agent", 1, 99.0, 99.0) for group in ("0:1", "0:2")], LoopTimes()

        async def run_group(self, task):
            await asyncio.sleep(60)

    async def main():
        pool = RunnerPool(lambda name: Deaf.remote(), 1, deadline_s=60, attempts=1)
        group = asyncio.create_task(pool.run_group(SimpleNamespace(prompt=SimpleNamespace(group_id="0:2"))))
        await asyncio.sleep(0)
        assert [state.group_id for state in await pool.states()] == ["0:2"]
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        assert await pool.states() == []

    asyncio.run(main())


BLOCKS = """
import time
from molt.agents import Env, StepEnvRunner


class Blocks(Env):
    async def reset(self, state):
        time.sleep(300)
        return state


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Blocks)
"""


@pytest.mark.ray
def test_a_runner_says_which_line_blocks_it_while_it_does(ray_session, model_dir, tmp_path):
    """`states` cannot answer then: it is in the loop that is blocked."""
    agent = tmp_path / "agent.py"
    agent.write_text(BLOCKS)
    settings = RunnerSettings(str(agent), model_dir, PromptDataConfig(max_len=64), RolloutConfig(), seed=1)
    runner = RunnerWorker.options(num_cpus=0).remote(settings, [], "runner0")

    async def main():
        await runner.states.remote()
        runner.run_group.options(num_returns=2).remote(task())
        async with asyncio.timeout(60):
            while not (blocks := await runner.blocks.remote()):
                await asyncio.sleep(0.2)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await runner.states.remote()
        return blocks

    try:
        (block,) = asyncio.run(main())
    finally:
        ray.kill(runner)
    assert block.place == f"{agent}:8" and 3.0 < block.seconds < 60.0
