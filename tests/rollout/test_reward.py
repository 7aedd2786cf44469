"""The reward stage in a runner: rollouts that wait for their scores, scores that fail, judges, the cache.

What is faked is the seam to the engine actors, `engine.generate.remote(...)`.
"""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from molt.config import PromptDataConfig, RewardConfig, RolloutConfig
from molt.rollout.agent_host import AgentHost, RunnerSettings, longest_s
from molt.rollout.group_task import GroupTask
from molt.rollout.reward import SCORE_ATTEMPTS, scoring_s
from molt.types import InfraFailure, PolicyFailure, Prompt, Scored, Unscored
from tests.streams import turn_from
from tests.tiny import END_ID

pytestmark = pytest.mark.processes

AGENT = """
from molt.agents import Env, PolicyFailure, Result, StepEnvRunner


class Says(Env):
    async def step(self, state):
        if state["label"] == "reject":
            raise PolicyFailure(-1.0, "rejected")
        return Result(0.5, info={"mood": "good", "turn": state["turn"]})


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Says)
"""

CHAT_AGENT = """
from openai import AsyncOpenAI
from molt.agents import ChatAgent, ChatAgentRunner, Result


class Asks(ChatAgent):
    async def run(self, ctx):
        async with AsyncOpenAI(base_url=ctx.openai_url, api_key=ctx.api_key) as client:
            await client.chat.completions.create(model=ctx.model, messages=ctx.prompt)
        return Result(0.5)


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Asks)
"""

# `trajectory.label` says what happens; COUNT is a file with a line for every call.
SCORER = """
import os, time
from molt.agents import PolicyFailure, Result

COUNT = {count!r}
GATE = {gate!r}

def score(trajectory):
    with open(COUNT, "a") as file:
        file.write("call\\n")
    calls = len(open(COUNT).readlines())
    what = trajectory.label
    if what == "gate":
        while not os.path.exists(GATE):
            time.sleep(0.01)
    if isinstance(what, int) and calls <= what:
        raise RuntimeError("not yet")
    if what == "reject":
        raise PolicyFailure(-2.0, "by the scorer")
    info = {{"letters": len(trajectory.answer), "agent": trajectory.agent_reward, "mood": trajectory.info.get("mood")}}
    return Result(len(trajectory.answer), score=1.0, info=info)
"""


class Engine:
    """An engine actor's handle: answers `RS<end>`, the ids 50 and 51 of the tiny tokenizer."""

    def __init__(self, delay_s=0.0):
        self.calls = 0
        self.delay_s = delay_s
        self.generate = SimpleNamespace(remote=self._generate)
        self.alive = SimpleNamespace(remote=self._alive)

    async def _alive(self):
        return True

    async def _generate(self, request_id, prompt_ids, sampling, media=()):
        self.calls += 1
        await asyncio.sleep(self.delay_s)
        sampled = np.array([50, 51, END_ID], np.int32)
        logprobs = np.full(3, -1.0, np.float32)
        return turn_from(prompt_ids, sampled, logprobs, np.zeros(3, np.int32), "stop")


class World:
    """Hosts with one scorer, and what it was called."""

    def __init__(self, model_dir, directory):
        self.model_dir = model_dir
        self.directory = directory
        self.count = directory / "count"
        self.gate = directory / "gate"
        self.agent = AGENT
        self.scorer = SCORER.format(count=str(self.count), gate=str(self.gate))
        self.engine = Engine()
        self.scheme = None

    def host(self, *, max_retries=2, chat=False, scorer=True, **reward):
        (self.directory / "agent.py").write_text(self.agent)
        (self.directory / "scorer.py").write_text(self.scorer)
        if scorer:
            reward["scorer"] = str(self.directory / "scorer.py")
        scheme = None
        if self.scheme is not None:
            scheme = str(self.directory / "scheme.py")
            (self.directory / "scheme.py").write_text(self.scheme)
        settings = RunnerSettings(
            str(self.directory / "agent.py"),
            self.model_dir,
            PromptDataConfig(max_len=64, apply_chat_template=chat),
            RolloutConfig(timeout_s=20.0, max_retries=max_retries, scheme=scheme),
            seed=1,
            reward=RewardConfig(**{"scorer_timeout_s": 10.0, "num_scorers": 1, **reward}),
        )
        return AgentHost(settings, [self.engine], "runner0")

    @property
    def calls(self):
        """Of the scorer."""
        return len(self.count.read_text().splitlines()) if self.count.exists() else 0


@pytest.fixture
def world(model_dir, tmp_path):
    return World(model_dir, tmp_path)


def task(label="fine", n=1, chat=False, by_scheme=False):
    messages = [{"role": "user", "content": "say"}] if chat else None
    prompt = Prompt(0, 0, 0, messages=messages, text=None if chat else "say", label=label)
    return GroupTask(prompt, n, 1.0, 1.0, -1, None, by_scheme)


async def finished(host, group_task):
    """The rollouts of a group, as `RunnerPool.run_group` gets them, and their samples."""
    result, samples = await host.run_group(group_task)
    while not result.is_finished:
        if result.sampling:
            result, samples = await host.run_group(group_task, result, samples)
        else:
            result = await host.score_group(group_task, result, samples)
    assert not host.attempts and not host._groups
    return result.rollouts, samples


def play(host, *args, **kwargs):
    async def main():
        try:
            async with asyncio.timeout(60):
                return await finished(host, task(*args, **kwargs))
        finally:
            await host.close()

    return asyncio.run(main())


def test_the_reward_of_the_scorer_replaces_that_of_the_agent(world):
    rollouts, samples = play(world.host(), n=3)
    for rollout, (sample,) in zip(rollouts, samples, strict=True):
        assert rollout.outcome == Scored(2.0, 1.0)  # two letters
        # Numbers of the agent and of the scorer; `mood` is none, and reached the scorer all the same.
        assert rollout.metrics == {"turn": 0.0, "letters": 2.0, "agent": 0.5}
        assert rollout.scoring.seconds > 0 and rollout.scoring.is_cached is None and not rollout.scoring.failures
        assert rollout.generated_tokens == sample.mask.sum() == 3 and rollout.turns == 1
    assert world.calls == world.engine.calls == 3


def test_without_a_scorer_the_agent_gives_the_reward(world):
    (rollout,), _ = play(world.host(scorer=False))
    assert rollout.outcome == Scored(0.5, 0.5) and rollout.scoring is None and world.calls == 0


def test_what_the_agent_rejects_is_not_scored(world):
    (rollout,), _ = play(world.host(), "reject")
    assert isinstance(rollout.outcome, PolicyFailure) and rollout.reward == -1.0 and world.calls == 0


def test_a_scorer_can_reject_too(world):
    world.agent = AGENT.replace('state["label"] == "reject"', "False")
    (rollout,), _ = play(world.host(), "reject")
    assert (rollout.outcome.reward, rollout.outcome.reason) == (-2.0, "by the scorer")


def test_a_chat_agent_is_scored_alike(world):
    world.agent = CHAT_AGENT
    (rollout,), _ = play(world.host(chat=True), chat=True)
    assert rollout.outcome == Scored(2.0, 1.0) and rollout.metrics["letters"] == 2.0


def test_a_score_that_fails_is_repeated_on_the_same_trajectory(world):
    (rollout,), _ = play(world.host(), 2)  # the first two calls fail
    assert rollout.outcome == Scored(2.0, 1.0) and world.engine.calls == 1 and world.calls == 3
    assert [failure.reason for failure in rollout.scoring.failures] == ["scorer_RuntimeError"] * 2
    assert rollout.failures == ()  # none of them is an attempt at the rollout


def test_then_the_rollout_is_sampled_anew(world):
    (rollout,), _ = play(world.host(), SCORE_ATTEMPTS)  # all of the first trajectory
    assert rollout.outcome == Scored(2.0, 1.0) and world.engine.calls == 2 and world.calls == SCORE_ATTEMPTS + 1
    assert [failure.reason for failure in rollout.failures] == ["scorer_RuntimeError"]
    assert len(rollout.scoring.failures) == SCORE_ATTEMPTS - 1


def test_a_rollout_whose_scores_always_fail_has_no_reward(world):
    (rollout,), _ = play(world.host(max_retries=1), 1000)
    assert isinstance(rollout.outcome, InfraFailure) and rollout.outcome.reason == "scorer_RuntimeError"
    assert "not yet at " in rollout.outcome.detail and len(rollout.failures) == 1
    assert world.engine.calls == 2 and world.calls == 2 * SCORE_ATTEMPTS
    assert rollout.scoring is not None and len(rollout.scoring.failures) == 2 * (SCORE_ATTEMPTS - 1)


def test_a_group_that_waits_for_scores_no_longer_generates(world):
    async def main():
        host = world.host()
        group_task = task("gate", n=2)
        try:
            async with asyncio.timeout(30):
                result, samples = await host.run_group(group_task)
                assert not result.is_finished and not result.sampling and len(samples) == 2
                assert all(isinstance(rollout.outcome, Unscored) for rollout in result.rollouts)
                states, _ = await host.states()
                assert [(state.doing, state.turns) for state in states] == [("scorer", 1)] * 2
                world.gate.touch()
                result = await host.score_group(group_task, result, samples)
                assert [rollout.outcome for rollout in result.rollouts] == [Scored(2.0, 1.0)] * 2
                assert world.engine.calls == 2 and not host._groups
        finally:
            await host.close()

    asyncio.run(main())


def test_another_runner_computes_only_the_scores(world):
    async def main():
        first, second = world.host(), world.host()
        group_task = task("gate", n=2)
        try:
            async with asyncio.timeout(30):
                result, samples = await first.run_group(group_task)
                await first.close()  # the runner is gone
                world.gate.touch()
                result = await second.score_group(group_task, result, samples)
                assert [rollout.outcome for rollout in result.rollouts] == [Scored(2.0, 1.0)] * 2
                assert world.engine.calls == 2
        finally:
            await first.close()
            await second.close()

    asyncio.run(main())


def test_a_group_generates_again_when_a_score_fails_for_good(world):
    world.scorer = (
        world.scorer.replace('if what == "gate":', "if calls <= 3:")
        .replace("if isinstance(what, int)", "if calls <= 3")
        .replace("and calls <= what", "")
    )

    async def main(continued_by_another):
        host = world.host()
        other = world.host() if continued_by_another else host
        group_task = task("any")
        try:
            async with asyncio.timeout(30):
                result, samples = await host.run_group(group_task)
                assert isinstance(result.rollouts[0].outcome, Unscored)
                world.gate.touch()
                result = await host.score_group(group_task, result, samples)
                assert result.sampling == (0,) and not result.is_finished
                assert result.rollouts[0].outcome.reason == "scorer_RuntimeError"
                result, samples = await other.run_group(group_task, result, samples)
                assert not result.sampling and len(samples[0]) == 1
                result = await other.score_group(group_task, result, samples)
                assert result.is_finished and result.rollouts[0].outcome == Scored(2.0, 1.0)
                assert len(result.rollouts[0].failures) == 1
        finally:
            await host.close()
            await other.close()

    asyncio.run(main(continued_by_another=False))
    world.count.unlink()
    world.gate.unlink()
    asyncio.run(main(continued_by_another=True))


def test_a_group_that_is_taken_away_leaves_nothing_behind(world):
    async def main():
        host = world.host()
        try:
            result, samples = await host.run_group(task("gate"))
            waiting = asyncio.create_task(host.score_group(task("gate"), result, samples))
            await asyncio.sleep(0.2)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not host.attempts and not host._groups
        finally:
            await host.close()

    asyncio.run(main())


JUDGED = """
import json, urllib.request

def score(trajectory, judge_url):
    body = {"model": "policy", "messages": [{"role": "user", "content": "is it " + trajectory.answer + "?"}]}
    request = urllib.request.Request(
        judge_url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    return float(said == trajectory.answer)
"""


SCHEME = """
async def run_group(task, rollout):
    first = await rollout(0)
    await rollout(1, prompt="again", given={"first": first.reward})
"""


def test_a_scheme_knows_a_rollout_by_its_score(world):
    """The first two scores of the draft fail; its revision is given what the scorer said in the end."""
    world.scheme = SCHEME
    world.agent = AGENT.replace('info={"mood"', 'info={**state["given"], "mood"')
    world.scorer = world.scorer.replace("if isinstance(what, int) and calls <= what", "if calls <= 2")
    rollouts, samples = play(world.host(num_scorers=2), n=2, by_scheme=True)
    assert [rollout.outcome for rollout in rollouts] == [Scored(2.0, 1.0)] * 2
    assert "first" not in rollouts[0].metrics and rollouts[1].metrics["first"] == 2.0
    assert [len(rollout.scoring.failures) for rollout in rollouts] == [2, 0]
    assert len(samples[1][0]) > len(samples[0][0])  # "again" is longer than "say"
    assert world.engine.calls == 2 and world.calls == 4


def test_a_draft_without_a_score_ends_the_group_of_a_scheme(world):
    world.scheme = SCHEME
    rollouts, _ = play(world.host(max_retries=0), 1000, n=2, by_scheme=True)
    assert [rollout.outcome.reason for rollout in rollouts] == ["scorer_RuntimeError"]
    assert world.engine.calls == 1


def test_a_group_that_the_agent_wants_replaced_leaves_nothing_behind(world):
    """Rollout 0 waits for its score when the agent asks for another prompt."""
    world.agent = AGENT.replace("class Says(Env):", "played = []\n\nclass Says(Env):").replace(
        'if state["label"] == "reject":\n            raise PolicyFailure(-1.0, "rejected")',
        'played.append(0)\n        if len(played) == 2:\n            raise ReplaceGroup("stale")',
    )
    world.agent = world.agent.replace("PolicyFailure", "ReplaceGroup")

    async def main():
        host = world.host()
        try:
            async with asyncio.timeout(30):
                result, samples = await host.run_group(task("gate", n=2))
                assert result.is_finished and result.replaced.reason == "stale" and samples == []
                assert not host.attempts and not host._groups
        finally:
            await host.close()

    asyncio.run(main())


def test_a_scorer_can_use_the_engines_as_a_judge(world):
    world.scorer = JUDGED
    (rollout,), ((sample,),) = play(world.host(chat=True), chat=True)
    assert rollout.outcome == Scored(1.0, 1.0)
    assert world.engine.calls == 2 and sample.mask.sum() == 3  # what the judge said is in no sample
    assert rollout.turns == 1


def test_scores_are_kept_on_disk(world):
    cache = {"cache_dir": world.directory / "scores"}
    first, _ = play(world.host(**cache), n=2)
    again, _ = play(world.host(**cache), n=2)
    # Both rollouts of a group say the same here, so even in the first run one may find the other's score.
    assert not all(rollout.scoring.is_cached for rollout in first) and world.calls <= 2
    assert [rollout.scoring.is_cached for rollout in again] == [True, True]
    assert [rollout.outcome for rollout in again] == [rollout.outcome for rollout in first]
    assert again[0].metrics == first[0].metrics
    calls = world.calls
    world.scorer = world.scorer.replace("len(trajectory.answer), score", "5, score")
    (rollout,), _ = play(world.host(**cache))
    assert rollout.outcome == Scored(5.0, 1.0) and not rollout.scoring.is_cached and world.calls == calls + 1


def test_a_failure_and_a_rejection_are_not_confused_on_disk(world):
    world.agent = AGENT.replace('state["label"] == "reject"', "False")
    cache = {"cache_dir": world.directory / "scores"}
    play(world.host(**cache), "reject")
    (rollout,), _ = play(world.host(**cache), "reject")
    assert rollout.scoring.is_cached and rollout.outcome.reason == "by the scorer"
    play(world.host(**cache, max_retries=0), 1000)
    (rollout,), _ = play(world.host(**cache, max_retries=0), 1000)
    assert isinstance(rollout.outcome, InfraFailure)  # tried again: failures are not kept


def test_a_scorer_that_cannot_be_loaded_is_no_runner(world):
    from molt.errors import AgentError

    world.scorer = "def scores(trajectory): ..."

    async def main():
        host = world.host()
        try:
            await host.ready()
        finally:
            await host.close()

    with pytest.raises(AgentError, match="exports no function `score`"):
        asyncio.run(main())


def test_a_runner_is_not_blocked_while_a_scorer_computes(world):
    world.scorer = "def score(trajectory):\n    return 88**77**6\n"

    async def main():
        host = world.host(scorer_timeout_s=1.0, max_retries=0)
        await host.ready()
        group = asyncio.create_task(finished(host, task()))
        worst_s = 0.0
        while not group.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            worst_s = max(worst_s, time.monotonic() - before)
        (rollout,), _ = await group
        await host.close()
        assert rollout.outcome.reason == "scorer_timeout"
        assert worst_s < 0.9  # a blocked loop would not wake for all of the second

    asyncio.run(main())


def test_deadlines_by_hand():
    rollout = RolloutConfig(timeout_s=100.0, max_retries=1)
    assert scoring_s(rollout, RewardConfig()) == 0
    reward = RewardConfig(scorer="x.py", scorer_timeout_s=10.0)
    assert scoring_s(rollout, reward) == 130.0  # 100 for a free process, 3 calls of 10
    assert longest_s(rollout, reward) == 520.0  # 2 * (100 + 30 to close + 130)


REASONING_GYM = """
from types import SimpleNamespace
factory = SimpleNamespace(DATASETS={"sums": None})

class Sums:
    def __init__(self, seed):
        self.seed = seed
    def __len__(self):
        return 10
    def __getitem__(self, index):
        return {"question": f"What is {self.seed + index} + 1?", "answer": self.seed + index + 1}
    def score_answer(self, answer, entry):
        return float(answer is not None and eval(answer) == entry["answer"])

def create_dataset(name, seed):
    return Sums(seed)

def extract_answer(text):
    return text

utils = SimpleNamespace(extract_answer=extract_answer)
"""


@pytest.mark.parametrize(("said", "label", "reward"), [("6*7", 41, 1.0), ("6*7", 40, 0.0), ("88**77**6", 0, None)])
def test_reasoning_gym_scores_in_a_process_that_can_be_killed(tmp_path, monkeypatch, said, label, reward):
    from molt.agents.adapters import ReasoningGymEnv
    from molt.agents.load import scorer_of
    from molt.agents.trajectory import Trajectory
    from molt.rollout.scorer_pool import ScorerPool

    library = tmp_path / "library"
    library.mkdir()
    (library / "reasoning_gym.py").write_text(REASONING_GYM)
    monkeypatch.setenv("PYTHONPATH", str(library))

    env = ReasoningGymEnv("sums", lambda seed: list(range(10)), lambda text: text)
    env._seed, env._index = 10 * (label // 10), label % 10
    result = asyncio.run(env.step({"action": said}))
    assert result.reward == 0.0 and not [value for value in result.info.values() if isinstance(value, int | float)]
    trajectory = Trajectory("p", label, "s", None, [], 1, 1, 1, 2, None, result.info, 0.0, 0.0).to_json()

    async def main():
        path = scorer_of("reasoning_gym:sums", None)
        assert path is not None and Path(path).is_file()
        pool = ScorerPool(path, 1, 2.0)
        try:
            return (await pool.call(trajectory))["reward"]
        except InfraFailure as failure:
            assert failure.reason == "scorer_timeout"
        finally:
            await pool.close()

    assert asyncio.run(main()) == reward
