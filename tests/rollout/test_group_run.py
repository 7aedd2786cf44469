"""Groups whose rollouts depend on each other: the order is the scheme's, all the rest is as without one."""

import asyncio
import contextlib
import re
from types import SimpleNamespace

import numpy as np
import pytest

from molt.config import EvalConfig, PromptDataConfig, RewardConfig, RolloutConfig
from molt.errors import AgentError
from molt.rollout.agent_host import SCHEME, AgentHost, RunnerSettings, longest_s
from molt.rollout.group_run import GroupRun, PlayedRollout
from molt.rollout.group_task import GroupTask, group_task
from molt.rollout.model_calls import RolloutKey
from molt.types import InfraFailure, PolicyFailure, Prompt, ReplaceGroup, RolloutInfo, Scored
from tests.streams import turn_from
from tests.tiny import END_ID, char_tokenizer

DRAFT_REVISE = "examples/python/schemes/draft_revise.py"
LETTERS = "abcdefgh"
AGENT = """
from molt.agents import Env, Result, StepEnvRunner


class Letter(Env):
    failed = set()

    async def step(self, state):
        is_revision = "draft_reward" in state["given"]
        wanted = {"drafts fail": not is_revision, "revisions fail": is_revision}.get(state["label"], False)
        if state["label"] == "drafts fail once" and not is_revision and len(Letter.failed) < 2:
            Letter.failed.add(state["seed"])
            wanted = True
        if wanted:
            raise ConnectionError("no sandbox")
        info = {f"given_{name}": value for name, value in state["given"].items()}
        return Result("abcdefgh".index(state["action"]) / 8, info=info)


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Letter)
"""


class LetterEngine:
    """An engine actor's handle: answers with a letter that the seed chooses."""

    def __init__(self, holds_after=None):
        self.calls: list[tuple[list[int], int]] = []
        self.holds_after = holds_after
        """So many calls are answered; the others wait for ever."""
        self.generate = SimpleNamespace(remote=self._generate)
        self.alive = SimpleNamespace(remote=self._alive)
        self.tokenizer = char_tokenizer()

    async def _alive(self):
        return True

    async def _generate(self, request_id, prompt_ids, sampling, media=()):
        self.calls.append((list(prompt_ids), sampling.seed))
        await asyncio.sleep(0)
        if self.holds_after is not None and len(self.calls) > self.holds_after:
            await asyncio.sleep(60)
        letter = self.tokenizer.encode(LETTERS[sampling.seed % 8], add_special_tokens=False)
        sampled = np.array([*letter, END_ID], np.int32)
        return turn_from(
            np.array(prompt_ids, np.int32), sampled, np.full(2, -1.0, np.float32), np.zeros(2, np.int32), "stop"
        )

    @property
    def prompts(self):
        return [self.tokenizer.decode(ids) for ids, _ in self.calls]


@pytest.fixture
def host(model_dir, tmp_path):
    """Builds a host of the agent above: `host(engine)`."""
    (tmp_path / "agent.py").write_text(AGENT)

    def build(engine, *, scheme=DRAFT_REVISE, apply_chat_template=False):
        rollout = RolloutConfig(timeout_s=5.0, max_retries=2, scheme=scheme, n_samples_per_prompt=5)
        data = PromptDataConfig(max_len=256, apply_chat_template=apply_chat_template)
        settings = RunnerSettings(str(tmp_path / "agent.py"), model_dir, data, rollout, seed=1)
        return AgentHost(settings, [engine], "runner0")

    return build


def task(label=None, n=5, **prompt):
    row = Prompt(0, 0, 0, **{"messages": None, "text": "say", "label": label} | prompt)
    return GroupTask(row, n, temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=None, by_scheme=True)


def run(host, *args, **kwargs):
    return asyncio.run(asyncio.wait_for(host.run_group(task(*args, **kwargs)), 20))


def seed_of_call(index, attempt=0):
    return RolloutKey(train_seed=1, epoch=0, position=0, index=index, attempt=attempt).call_seed(0)


def letter_of(index, attempt=0):
    return LETTERS[seed_of_call(index, attempt) % 8]


def test_a_revision_sees_its_draft_and_the_group_is_complete(host):
    engine = LetterEngine()
    result, samples = run(host(engine))
    assert result.failure is None and [r.index for r in result.rollouts] == [0, 1, 2, 3, 4]
    # Of five rollouts three are drafts; rollouts 3 and 4 revise the first two.
    request = "Look for mistakes in your answer, and answer again."
    assert engine.prompts[:3] == ["say"] * 3
    assert sorted(engine.prompts[3:]) == sorted(f"say{letter_of(draft)}\n{request}\n" for draft in (0, 1))
    for rollout, segments in zip(result.rollouts, samples, strict=True):
        reward = LETTERS.index(letter_of(rollout.index)) / 8
        assert rollout.outcome == Scored(reward, reward) and len(segments) == 1
    for draft, revision in ((0, 3), (1, 4)):
        given = {"given_draft_reward": result.rollouts[draft].reward}
        assert result.rollouts[revision].metrics == given and result.rollouts[draft].metrics == {}
        text = engine.tokenizer.decode(samples[revision][0].token_ids)
        assert text.startswith(f"say{letter_of(draft)}\n{request}")


def test_a_chat_goes_on_after_the_draft(host):
    engine = LetterEngine()
    messages = [{"role": "user", "content": "say"}]
    result, _ = run(host(engine, apply_chat_template=True), n=2, messages=messages, text=None)
    assert [r.failed for r in result.rollouts] == [False, False]
    draft, revision = engine.prompts
    assert draft.count("<|im_start|>") == 2  # the user's, and the opener of the answer
    assert f"<|im_start|>assistant\n{letter_of(0)}<|im_end|>" in revision and "Look for mistakes" in revision
    assert messages == [{"role": "user", "content": "say"}]


def test_a_draft_that_failed_is_retried_with_other_seeds_before_its_revision(host):
    engine = LetterEngine()
    result, samples = run(host(engine), "drafts fail once")
    assert [r.failed for r in result.rollouts] == [False] * 5 and all(samples)
    retried = [rollout.index for rollout in result.rollouts if rollout.failures]
    assert len(retried) == 2 and set(retried) <= {0, 1, 2}
    assert all([f.reason for f in result.rollouts[index].failures] == ["ConnectionError"] for index in retried)
    # The seeds of the drafts are those of any group, and a revision shows the attempt that succeeded.
    seeds = [seed for _, seed in engine.calls]
    expected = [seed_of_call(index) for index in range(5)] + [seed_of_call(index, attempt=1) for index in retried]
    assert sorted(seeds) == sorted(expected)
    for draft in (0, 1):
        shown = letter_of(draft, attempt=int(draft in retried))
        assert any(prompt.startswith(f"say{shown}\n") for prompt in engine.prompts)


def test_a_draft_without_a_result_ends_its_group_and_only_what_ran_is_counted(host):
    result, samples = run(host(LetterEngine()), "drafts fail", n=2)
    (draft,) = result.rollouts
    assert draft.failed and len(draft.failures) == 2 and draft.outcome.reason == "ConnectionError"
    assert result.failure is None and samples == [[]]


def test_a_revision_without_a_result_is_a_failed_rollout_of_its_group(host):
    result, _ = run(host(LetterEngine()), "revisions fail", n=2)
    assert [r.failed for r in result.rollouts] == [False, True] and result.failure is None


def test_a_group_that_starts_again_is_the_same_group(host, monkeypatch):
    """As after a dead runner, or a resume: what the first one had done plays no part."""
    monkeypatch.setattr("molt.rollout.engine_pool.ray.cancel", lambda call: None)  # there is no Ray
    whole = LetterEngine()
    expected, _ = run(host(whole))
    for answered in (0, 2, 4):
        interrupted = LetterEngine(holds_after=answered)

        async def stop(engine=interrupted):
            group = asyncio.create_task(host(engine).run_group(task()))
            while len(engine.calls) <= engine.holds_after:
                await asyncio.sleep(0)
            group.cancel()
            with pytest.raises(asyncio.CancelledError):
                await group

        asyncio.run(stop())
        engine = LetterEngine()
        again, _ = run(host(engine))
        assert sorted(engine.calls) == sorted(whole.calls)
        assert [(r.index, r.outcome) for r in again.rollouts] == [(r.index, r.outcome) for r in expected.rollouts]


def test_an_evaluation_has_no_scheme(host):
    rollout = RolloutConfig(scheme=DRAFT_REVISE, n_samples_per_prompt=4)
    prompt = task().prompt
    assert group_task(prompt, rollout).by_scheme
    measured = group_task(prompt, rollout, EvalConfig())
    assert not measured.by_scheme and not group_task(prompt, RolloutConfig()).by_scheme
    engine = LetterEngine()
    asyncio.run(host(engine).run_group(measured))
    assert engine.prompts == ["say"] * 4


def test_the_rollouts_of_a_scheme_may_follow_each_other():
    # 4 rollouts of two attempts of 180 s, and 30 s each to close
    limits = {"timeout_s": 180.0, "max_retries": 1, "n_samples_per_prompt": 4}
    assert longest_s(RolloutConfig(**limits, scheme=DRAFT_REVISE), RewardConfig()) == 4 * 420.0
    assert longest_s(RolloutConfig(**limits), RewardConfig()) == 420.0


def test_a_rollout_that_starts_after_the_scheme_has_ended_is_refused():
    async def main():
        late = []

        async def scheme(task, rollout):
            late.append(rollout)
            await rollout(0)

        async def play(group, index, given):
            return played(index)

        await GroupRun(task(n=2), scheme, play, str, seed=0, limit_s=None).run()
        with pytest.raises(AgentError, match="after run_group had ended"):
            await late[0](1)

    asyncio.run(main())


# Schemes of a few lines, over rollouts that end at once.


def played(index, outcome=None):
    turn = turn_from(np.arange(2), np.array([index, 9]), np.zeros(2), np.zeros(2), "stop")
    info = RolloutInfo("0:0", index, outcome or Scored(index / 4, index / 4), None, 1, (), metrics={"i": index})
    return PlayedRollout(info, samples=[], turns=[turn])


def run_scheme(scheme, *, outcomes=None, n=3, limit_s=None, play=None, **prompt):
    """outcomes: by index."""

    async def play_at_once(group, index, given):
        await asyncio.sleep(0)
        return played(index, (outcomes or {}).get(index))

    seed = RolloutKey(train_seed=1, epoch=0, position=0, index=SCHEME).episode_seed()

    def decode(ids):
        return " ".join(map(str, ids))

    group = GroupRun(task(n=n, **prompt), scheme, play or play_at_once, decode, seed=seed, limit_s=limit_s)
    result, samples = asyncio.run(asyncio.wait_for(group.run(), 20))
    assert len(samples) in (0, len(result.rollouts))
    return result


async def all_at_once(task, rollout):
    await asyncio.gather(*(rollout(index) for index in range(task.n)))


def test_all_may_start_at_once_and_a_failed_one_stops_no_other():
    started = []

    async def play(group, index, given):
        started.append(index)
        await asyncio.sleep(0)
        assert started == [0, 1, 2] and given == {}
        return played(index, InfraFailure("timeout") if index == 0 else None)

    result = run_scheme(all_at_once, play=play)
    assert [r.failed for r in result.rollouts] == [True, False, False] and result.failure is None


def test_what_a_scheme_knows_of_a_group_and_of_a_finished_rollout():
    seen = []

    async def scheme(task, rollout):
        seen.append((task.prompt, task.label, task.n, task.seed))
        first, failed, third = [await rollout(index) for index in (0, 1, 2)]
        assert (first.index, first.reward, first.score, first.cut, first.info) == (0, 0.0, 0.0, None, {"i": 0})
        assert first.answers == ["0 9"] and first.answer == "0 9" and first.texts == [] and not first.failed
        assert third.reward == -1.0 and not third.failed  # the model's own doing is a result
        assert failed.failed
        for name in ("reward", "score", "answer", "answers", "texts"):
            with pytest.raises(InfraFailure, match="timeout"):
                getattr(failed, name)
        seen.append("end")

    outcomes = {1: InfraFailure("timeout"), 2: PolicyFailure(-1.0)}
    result = run_scheme(scheme, outcomes=outcomes, label={"answer": 4})
    seed = RolloutKey(train_seed=1, epoch=0, position=0, index=-1).episode_seed()
    assert seen == [("say", {"answer": 4}, 3, seed), "end"]
    assert [r.failed for r in result.rollouts] == [False, True, False] and result.failure is None


def in_turn(*indices):
    async def scheme(task, rollout):
        for index in indices:
            await rollout(index)

    return scheme


async def raises(task, rollout):
    await rollout(0)
    raise KeyError("x")


async def leaks(task, rollout):
    other = asyncio.ensure_future(asyncio.sleep(60))
    other.cancel()
    await other


async def sleeps(task, rollout):
    await asyncio.sleep(60)


async def does_not_wait(task, rollout):
    running = [asyncio.ensure_future(rollout(index)) for index in range(task.n)]
    await asyncio.sleep(0)
    assert running


async def shows_messages(task, rollout):
    await rollout(0, prompt=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("scheme", "ended", "reason", "detail"),
    [
        (in_turn(0, 1, 0), 2, "AgentError", r"rollout\(0\) in a group of 3 .*each of 0 .. 2 runs once"),
        (in_turn(0, 3), 1, "AgentError", r"rollout\(3\) in a group of 3 .*of which \[0\] were started"),
        (in_turn(0, 1), 2, "scheme", "when 2 of 3 rollouts had ended: await all"),
        (does_not_wait, 0, "scheme", "when 0 of 3 rollouts had ended"),
        (shows_messages, 0, "AgentError", "is a list: the model cannot be shown it. Pass a text"),
        (raises, 1, "KeyError", r"'x' at .*test_group_run.py:\d+"),
        (leaks, 0, "CancelledError", "test_group_run.py"),
        (sleeps, 0, "timeout", "the scheme did not end within 0.05 s"),
    ],
)
def test_a_scheme_that_is_wrong_is_a_failure_of_its_group(scheme, ended, reason, detail):
    result = run_scheme(scheme, limit_s=0.05 if scheme is sleeps else None)
    assert len(result.rollouts) == ended and not any(r.failed for r in result.rollouts)
    assert result.failure.reason == reason and re.search(detail, result.failure.detail)


def test_a_scheme_may_ask_for_another_prompt_and_ends_the_rollouts_that_run():
    cancelled = []

    async def play(group, index, given):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(index)
            raise

    async def scheme(task, rollout):
        running = [asyncio.ensure_future(rollout(index)) for index in range(task.n)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for each in running:
            each.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        raise ReplaceGroup("drafts_agree", "nothing to revise")

    result = run_scheme(scheme, play=play)
    assert (result.replaced.reason, result.replaced.detail) == ("drafts_agree", "nothing to revise")
    assert result.rollouts == [] and sorted(cancelled) == [0, 1, 2]


@pytest.mark.parametrize("error", [ReplaceGroup("stale_task"), AssertionError("the stream was rewritten")])
def test_what_a_rollout_raises_is_not_hidden_by_a_scheme_that_catches_everything(error):
    """A rollout raises when its prompt is to be replaced, or when molt has a bug."""

    async def play(group, index, given):
        raise error

    async def scheme(task, rollout):
        for index in range(task.n):
            with contextlib.suppress(Exception):
                await rollout(index)

    if isinstance(error, ReplaceGroup):
        assert run_scheme(scheme, play=play).replaced.reason == "stale_task"
    else:
        with pytest.raises(AssertionError, match="rewritten"):
            run_scheme(scheme, play=play)
