"""Episodes of an `Env` against a scripted model: which ids it sees, its budgets, and how episodes end."""

import asyncio
import functools
import inspect
import sqlite3
import threading
import time
from datetime import date
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from molt.agents import Env, PolicyFailure, Result, StepEnvRunner
from molt.agents.env import info_numbers
from molt.agents.step_runner import EpisodeContext
from molt.chat.render import Renderer
from molt.columns import TURN_REWARD
from molt.errors import AgentError
from molt.types import InfraFailure, Prompt, ReplaceGroup, Scored, Turn
from tests.streams import turn_from
from tests.tiny import END_ID, char_tokenizer

TOKENIZER = char_tokenizer()
CHAT = Renderer(TOKENIZER, apply_chat_template=True)
PLAIN = Renderer(TOKENIZER, apply_chat_template=False)
MESSAGES = [{"role": "user", "content": "hi"}]


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False).input_ids


PROMPT_TEXT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
PROMPT_LENGTH = len(ids(PROMPT_TEXT))  # 1 + 4 + 1 + 2 + 1 + 1 + 1 + 9 + 1 = 21


class Script:
    """A model that answers what it is told; remembers what it was asked."""

    def __init__(self, *answers: str):
        self.answers = list(answers)
        self.seen: list[list[int]] = []
        self.budgets: list[int] = []

    async def __call__(self, prompt_ids: list[int], max_tokens: int) -> Turn:
        self.seen.append(list(prompt_ids))
        self.budgets.append(max_tokens)
        sampled = [*ids(self.answers.pop(0)), END_ID][:max_tokens]
        n = len(sampled)
        return turn_from(
            np.array(prompt_ids, np.int32),
            np.array(sampled, np.int32),
            np.full(n, -0.5, np.float32),
            np.full(n, 3, np.int32),
            "stop" if sampled[-1] == END_ID else "length",
        )


class Scripted(Env):
    """Gives the results of the class in order; one that is an exception is raised."""

    results: list = []
    states: list = []
    closed = 0

    async def step(self, state):
        type(self).states.append(dict(state))
        result = type(self).results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    async def close(self):
        type(self).closed += 1


def scripted(*results) -> type[Scripted]:
    return type("Scripted", (Scripted,), {"results": list(results), "states": []})


def run(env_class, model, *, messages=MESSAGES, text=None, max_len=200, **limits):
    prompt = Prompt(0, 0, 0, None if text else messages, text, label="L", data_source="here")
    context = EpisodeContext(prompt, model, PLAIN if text else CHAT, seed=7, max_len=max_len, **limits)
    return asyncio.run(StepEnvRunner(env_class).run(context))


def test_one_turn_and_the_state_the_env_sees():
    env, model = scripted(Result(reward=1.0)), Script("ok")
    episode = run(env, model)
    assert TOKENIZER.decode(model.seen[0]) == PROMPT_TEXT
    assert episode.outcome == Scored(1.0, 1.0) and not episode.truncated
    assert [turn.token_ids.tolist() for turn in episode.turns] == [[*ids("ok"), END_ID]]
    assert env.states == [
        {
            "prompt": MESSAGES,
            "label": "L",
            "data_source": "here",
            "seed": 7,
            "given": {},
            "turn": 0,
            "action": "ok",
            "finish_reason": "stop",
        }
    ]
    assert env.closed == 1


def test_turn_two_sees_turn_one_plus_the_sampled_ids_plus_the_continuation():
    model = Script("a", "b")
    episode = run(scripted(Result(reward=0.25, observation="more", terminated=False), Result(reward=0.5)), model)
    first, second = model.seen
    continuation = ids("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")  # the model closed its own turn
    assert second == [*first, *ids("a"), END_ID, *continuation]
    assert episode.turns[1].prompt_ids.tolist() == second
    assert episode.outcome == Scored(0.75, 0.75)  # 0.25 + 0.5
    assert len(episode.turns) == 2


def test_what_a_turn_earned_stands_at_its_last_token():
    results = [Result(reward=0.25, observation="more", terminated=False), Result(reward=0.5)]
    episode = run(scripted(*results), Script("ab", "c"))
    earned = [turn.sampled.values(TURN_REWARD).tolist() for turn in episode.turns]
    assert earned == [[0, 0, 0.25], [0, 0.5]]  # each turn ends with the end token


def test_an_episode_that_earns_at_its_end_alone_has_no_such_column():
    results = [Result(reward=0.0, observation="more", terminated=False), Result(reward=0.5)]
    episode = run(scripted(*results), Script("ab", "c"))
    assert all(TURN_REWARD not in turn.sampled.arrays for turn in episode.turns)


def test_a_turn_cut_by_length_is_closed_for_the_model():
    model = Script("abcdef", "b")
    run(scripted(Result(0, observation="o", terminated=False), Result(0)), model, max_new_tokens=3)
    continuation = ids("<|im_end|>\n<|im_start|>user\no<|im_end|>\n<|im_start|>assistant\n")
    assert model.seen[1] == [*model.seen[0], *ids("abc"), *continuation]


def test_plain_text_continues_with_the_observation_as_it_is():
    model = Script("a", "b")
    run(scripted(Result(0, observation=" so?", terminated=False), Result(0)), model, text="say")
    assert model.seen == [ids("say"), [*ids("say"), *ids("a"), END_ID, *ids(" so?")]]


def test_budget_is_the_smallest_of_room_setting_and_the_envs_wish_for_the_next_turn():
    wish = {"max_new_tokens": np.int64(5)}
    results = [
        Result(0, observation="o", terminated=False, sampling_params=wish),
        Result(0, observation="o", terminated=False),
        Result(0),
    ]
    model = Script("a", "b", "c")
    run(scripted(*results), model, max_new_tokens=8)
    assert model.budgets == [8, 5, 8]  # a wish holds for one turn
    assert all(type(budget) is int for budget in model.budgets)  # the engine takes no other
    model = Script("a")
    run(scripted(Result(0)), model, max_len=PROMPT_LENGTH + 4, max_new_tokens=8)
    assert model.budgets == [4]
    model = Script("a")
    run(scripted(Result(0)), model)
    assert model.budgets == [200 - PROMPT_LENGTH]


def test_out_of_context_is_scored_with_what_was_earned_and_truncated():
    # After turn 1: 21 prompt + 2 sampled + at least 22 of template. No room for a second turn.
    env = scripted(Result(reward=0.5, observation="long", terminated=False))
    episode = run(env, Script("a"), max_len=PROMPT_LENGTH + 10)
    assert episode.outcome == Scored(0.5, 0.5) and episode.truncated and len(episode.turns) == 1
    assert env.closed == 1


def test_a_prompt_that_leaves_no_room_for_a_first_turn_says_nothing_about_the_policy():
    env = scripted()
    with pytest.raises(ReplaceGroup) as replaced:  # a retry would meet the same prompt
        run(env, Script(), max_len=PROMPT_LENGTH)
    assert replaced.value.reason == "prompt_too_long"
    assert replaced.value.detail == "reset left a prompt of 21 tokens, data.max_len is 21"
    assert env.closed == 1


@pytest.mark.parametrize(
    ("result", "answer", "cut"),
    [
        (Result(0), "ok", None),
        (Result(0, truncated=True), "ok", "agent"),
        (Result(0, terminated=False, truncated=True), "ok", "agent"),
        (Result(0, truncated="time"), "ok", "time"),
        (Result(0, truncated="length"), "ok", "length"),
        (Result(0), "cut by max_new_tokens", "length"),
        (Result(0, truncated=True), "cut by max_new_tokens", "length"),  # the environment only reacts to it
        (Result(0, truncated=np.bool_(True)), "ok", "agent"),
        (PolicyFailure(0.0, "no answer"), "cut by max_new_tokens", "length"),
        (PolicyFailure(0.0, "no answer"), "ok", None),
    ],
)
def test_a_cut_has_one_reason(result, answer, cut):
    episode = run(scripted(result), Script(answer), max_new_tokens=4)
    assert episode.cut == cut and episode.truncated is (cut is not None)


@pytest.mark.parametrize(
    ("last", "answer", "cut"),
    [
        (Result(0, terminated=False), "ok", "turns"),
        (Result(0, terminated=False, truncated="time"), "ok", "time"),
        (Result(0, terminated=False), "a cut one", "length"),
        (Result(0), "ok", None),
    ],
)
def test_the_reason_at_the_last_turn(last, answer, cut):
    first = Result(0, observation="o", terminated=False)
    assert run(scripted(first, last), Script("ok", answer), max_turns=2, max_new_tokens=4).cut == cut


def test_a_reason_that_does_not_exist_is_refused():
    with pytest.raises(AgentError, match=r"Result.truncated \(='tokens'\) is no reason.*length, turns, time, agent"):
        Result(0, truncated="tokens")


def test_an_environment_may_ask_for_another_prompt():
    env = scripted(ReplaceGroup("stale_task", "its image is gone"))
    with pytest.raises(ReplaceGroup, match="its image is gone"):
        run(env, Script("ok"))


def test_only_the_last_turn_tells_whether_the_episode_was_cut():
    results = [Result(0, observation="o", terminated=False), Result(0)]
    assert not run(scripted(*results), Script("cut by length", "ok"), max_new_tokens=4).truncated


def test_the_episode_ends_after_max_turns_as_truncated():
    going_on = [Result(0.5, observation="o", terminated=False) for _ in range(3)]
    episode = run(scripted(*going_on), Script("a", "b", "c"), max_turns=2)
    assert len(episode.turns) == 2 and episode.outcome == Scored(1.0, 1.0) and episode.truncated
    in_time = [Result(0, observation="o", terminated=False), Result(1)]
    assert not run(scripted(*in_time), Script("a", "b"), max_turns=2).truncated


def test_a_policy_failure_keeps_its_turns_and_its_own_reward():
    class Unparsable(PolicyFailure):  # lives in the user's file, which the driver does not have
        def __init__(self, what):
            super().__init__(-1.0, f"unparsable {what}")

    env = scripted(Result(0.5, observation="o", terminated=False), Unparsable("json"))
    episode = run(env, Script("a", "b"))
    assert type(episode.outcome) is PolicyFailure
    assert (episode.outcome.reward, episode.outcome.score, episode.outcome.reason) == (-1.0, -1.0, "unparsable json")
    assert len(episode.turns) == 2 and env.closed == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_reward_is_the_fault_of_the_infrastructure(bad):
    for result in (Result(bad), Result(0.0, score=bad), PolicyFailure(bad)):
        env = scripted(result)
        with pytest.raises(InfraFailure) as failure:
            run(env, Script("a"))
        assert failure.value.reason == "reward_not_finite" and str(bad) in failure.value.detail
        assert env.closed == 1


def test_what_the_env_raises_passes_through_and_it_is_closed():
    env = scripted(KeyError("sandbox"))
    with pytest.raises(KeyError, match="sandbox"):
        run(env, Script("a"))
    assert env.closed == 1


def test_close_has_a_deadline(monkeypatch):
    class Stuck(Scripted):
        results = [Result(1.0)]

        async def close(self):
            await asyncio.sleep(60)

    monkeypatch.setattr("molt.agents.step_runner.CLOSE_S", 0.05)
    with pytest.raises(TimeoutError):
        run(Stuck, Script("a"))


def test_score_defaults_to_the_episodes_reward_and_the_last_one_given_stands():
    again = {"observation": "o", "terminated": False}
    assert run(scripted(Result(0.5, **again), Result(1.0)), Script("a", "b")).outcome == Scored(1.5, 1.5)
    episode = run(scripted(Result(0.5, score=0.25, **again), Result(1.0)), Script("a", "b"))
    assert episode.outcome == Scored(1.5, 0.25)
    episode = run(scripted(Result(0.5, score=0.25, **again), Result(1.0, score=1.0)), Script("a", "b"))
    assert episode.outcome == Scored(1.5, 1.0)


def test_numbers_of_info_are_kept_the_later_ones_win():
    first = Result(0, "o", terminated=False, info={"tries": 1, "text": "x", "np": np.float32(0.5)})
    episode = run(scripted(first, Result(0, info={"tries": 2, "hit": True})), Script("a", "b"))
    assert episode.info == {"tries": 2.0, "np": 0.5, "hit": 1.0}


class Quantity:
    """A number of another library."""

    def __float__(self):
        return 1.5


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0),
        (np.bool_(True), 1.0),
        (np.float16(0.5), 0.5),
        (np.int64(-3), -3.0),
        (np.array(2), 2.0),
        (np.array([2.5]), 2.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(True), 1.0),
        (torch.tensor([0.5], requires_grad=True), 0.5),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (Decimal("0.25"), 0.25),
        (Fraction(1, 4), 0.25),
        (Quantity(), 1.5),
    ],
)
def test_every_kind_of_number_in_info_is_logged(value, number):
    assert info_numbers({"key": value}) == {"key": number}


@pytest.mark.parametrize(
    "value",
    [
        "3", b"3", np.str_("3"), np.array("3"), None, [1.0], {"a": 1}, 1j, np.complex128(1), torch.tensor(1j),
        np.array([1.0, 2.0]), np.array([]), torch.zeros(2), torch.zeros(0), date(2026, 1, 1),
        np.datetime64("2026-01-01", "ns"), np.timedelta64(1, "s"), 10**400, object, len,
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_number_in_info_is_left_out_and_harms_nothing(value):
    assert info_numbers({"key": value, "number": 1}) == {"number": 1.0}


def test_keys_of_info_become_text():
    """A checkpoint has them in JSON, which knows no other keys than text."""
    assert info_numbers({("a", 1): 2, 3: 4}) == {"('a', 1)": 2.0, "3": 4.0}


def test_reset_may_replace_the_prompt_and_leaves_the_groups_prompt_alone():
    class Prefixed(Env):
        async def reset(self, state):
            state["prompt"].insert(0, {"role": "system", "content": "be brief"})
            return state

        async def step(self, state):
            return Result(1.0)

    messages, model = [dict(MESSAGES[0])], Script("a", "b")
    for _ in range(2):  # two rollouts of one group
        run(Prefixed, model, messages=messages)
    assert messages == MESSAGES
    assert model.seen[0] == model.seen[1] == [*ids("<|im_start|>system\nbe brief<|im_end|>\n"), *ids(PROMPT_TEXT)]


@pytest.mark.parametrize(
    ("left", "message"),
    [
        (None, r"returned NoneType without a `prompt`.*Return the state"),
        ({"label": 1}, r"returned dict without a `prompt`"),
        ({"prompt": "text"}, r"left a str as `prompt`.*Leave a list"),
        ({"prompt": None}, r"left a NoneType as `prompt`"),
    ],
)
def test_reset_that_returns_nonsense(left, message):
    class Lost(Scripted):
        closed = 0

        async def reset(self, state):
            return left

    with pytest.raises(AgentError, match=message):
        run(Lost, Script())
    assert Lost.closed == 1


class Misspelt(Env):
    async def stepp(self, state):
        return Result(1.0)


class WithoutState(Env):
    async def step(self):
        return Result(1.0)


class NeedsArguments(Env):
    def __init__(self, grader):
        self.grader = grader


def test_step_must_return_a_result_and_must_exist():
    with pytest.raises(AgentError, match=r"step \(.*test_step_runner.py:\d+\) returned a float.*Return molt.agents.Re"):
        run(scripted(1.0), Script("a"))
    with pytest.raises(AgentError, match=r"Forgot.* defines no `async def step.*no reward can arise. Add it"):
        run(type("Forgot", (Env,), {}), Script("a"))


def first_line(defined) -> str:
    """`FILE:LINE` of a class or function in this file."""
    return f"{__file__}:{inspect.getsourcelines(defined)[1]}"


@pytest.mark.parametrize(
    ("env", "place", "said", "fix"),
    [
        (Misspelt, Misspelt, "defines no `async def step", "Did you mean 'stepp'?"),
        (WithoutState, WithoutState.step, "cannot be called (too many", "Write `async def step(self, state)`"),
        (NeedsArguments, NeedsArguments, "missing a required argument: 'grader'", "Give them defaults"),
    ],
)
def test_a_wrong_contract_names_the_line_of_the_user_and_the_fix(env, place, said, fix):
    with pytest.raises(AgentError) as raised:
        run(env, Script("a"))
    message = str(raised.value)
    assert f"({first_line(place)})" in message and said in message and fix in message


def test_methods_without_async_run_in_one_thread_and_block_nobody():
    idents = []

    class Plain(Env):
        def reset(self, state):
            self.memory = sqlite3.connect(":memory:")  # for this thread alone
            return state

        def step(self, state):
            idents.append(threading.get_ident())
            time.sleep(0.3)
            (found,) = self.memory.execute("select 1").fetchone()
            return Result(float(found), observation="more", terminated=state["turn"] == 1)

        def close(self):
            self.memory.close()
            idents.append(threading.get_ident())

    async def main():
        prompt = Prompt(0, 0, 0, MESSAGES, None, label="L")
        context = EpisodeContext(prompt, Script("a", "b"), CHAT, seed=7, max_len=200)
        playing = asyncio.create_task(StepEnvRunner(Plain).run(context))
        worst = 0.0
        while not playing.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            worst = max(worst, time.monotonic() - before)
        assert worst < 0.25, "the loop was blocked"
        return await playing

    assert asyncio.run(main()).outcome == Scored(2.0, 2.0)
    assert len(idents) == 3 and len(set(idents)) == 1 and threading.get_ident() not in idents


def test_a_decorated_or_returned_coroutine_is_awaited_in_the_loop():
    def logged(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args)

        return wrapper

    class Decorated(Env):
        @logged
        async def reset(self, state):
            asyncio.get_running_loop()
            return state

        def step(self, state):
            return self.graded()

        async def graded(self):
            asyncio.get_running_loop()
            return Result(1.0)

    assert run(Decorated, Script("a")).outcome == Scored(1.0, 1.0)


@pytest.mark.parametrize("where", ["__init__", "reset", "step", "close"])
@pytest.mark.parametrize("is_async", [True, False])
def test_an_exit_anywhere_in_an_env_is_a_failure(where, is_async):
    def exits(*_):
        raise SystemExit(2)

    async def exits_later(*_):
        raise SystemExit(2)

    env = type("Exits", (Scripted,), {"results": [Result(1.0)], where: exits_later if is_async else exits})
    if where == "__init__" and is_async:
        pytest.skip("a constructor is no coroutine")
    with pytest.raises(InfraFailure) as failure:
        run(env, Script("a"))
    assert failure.value.reason == "SystemExit" and f"2 at {__file__}:" in failure.value.detail


def test_what_a_step_raises_itself_passes_through():
    """A TypeError of the user's code is not one of the contract."""

    class Adds(Env):
        async def step(self, state):
            return Result(1 + state["action"])

    with pytest.raises(TypeError, match="unsupported operand"):
        run(Adds, Script("a"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward": "1.0"}, r"Result.reward \(='1.0'\) is not a number: nothing could be learned.*Return a float"),
        ({"reward": None}, r"Result.reward \(=None\) is not a number"),
        ({"reward": torch.zeros(2)}, r"Result.reward .* is not a number"),
        ({"reward": 1, "score": "good"}, r"Result.score \(='good'\) is not a number"),
        ({"reward": 1, "observation": [1]}, r"Result.observation is \[1\]: the framework renders text.*string"),
        ({"reward": 1, "sampling_params": {"temperature": 2}}, r"has \['temperature'\]: only \['max_new_tokens'\]"),
        ({"reward": 1, "sampling_params": {"max_new_tokens": 0}}, r"max_new_tokens \(=0\).*integer >= 1"),
        ({"reward": 1, "sampling_params": {"max_new_tokens": "5"}}, r"max_new_tokens \(='5'\)"),
    ],
)
def test_a_result_says_what_is_wrong_with_it(arguments, message):
    with pytest.raises(AgentError, match=message):
        Result(**arguments)


@pytest.mark.parametrize("end", [{}, {"truncated": True}, {"terminated": False, "truncated": "time"}])
def test_no_observation_is_needed_when_the_episode_ends(end):
    going_on = Result(0.25, observation="more", terminated=False)
    episode = run(scripted(going_on, Result(0.5, observation=None, **end)), Script("a", "b"))
    assert len(episode.turns) == 2 and episode.outcome == Scored(0.75, 0.75)  # 0.25 + 0.5


def test_an_observation_is_needed_when_it_goes_on():
    with pytest.raises(AgentError, match=r"Result.observation is None: the framework renders text.*string"):
        Result(0.0, observation=None, terminated=False)


@pytest.mark.parametrize("reward", [1, True, np.float32(1), np.int64(1), torch.tensor(1.0)])
def test_any_number_is_a_reward(reward):
    outcome = run(scripted(Result(reward)), Script("a")).outcome
    assert outcome == Scored(1.0, 1.0) and type(outcome.reward) is float
