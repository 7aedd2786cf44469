"""The seeds and the sampling of a rollout's model calls. A seed that changes breaks every resumed run."""

import asyncio
import hashlib
from dataclasses import replace

import numpy as np
import pytest

from molt.rollout.attempt import Attempt
from molt.rollout.group_task import GroupTask
from molt.rollout.model_calls import FREE, TRAINED, ModelCalls, RolloutKey, SeedsByPrompt, SeedsByTurn
from molt.types import Media, Prompt
from tests.streams import turn_from

KEY = RolloutKey(train_seed=7, epoch=2, position=11, index=1)
TASK = GroupTask(Prompt(2, 11, 0, None, "say"), 2, temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=None)
IMAGE = (Media(start=1, length=1, token_id=5, data=b"png"),)


class RecordingPool:
    """An `EnginePool` that keeps what it is asked for."""

    def __init__(self):
        self.rollouts, self.samplings, self.media, self.doing = [], [], [], []
        self.attempt = None

    async def generate(self, rollout, prompt_ids, sampling, timeout_s, media=()):
        self.rollouts.append(rollout)
        self.samplings.append(sampling)
        self.media.append(media)
        self.doing.append(self.attempt.state("runner0").doing)
        nothing = np.empty(0, np.int32)
        return turn_from(nothing, nothing, np.empty(0, np.float32), nothing, "stop")


def calls_of(trained_seeds):
    pool = RecordingPool()
    pool.attempt = Attempt("2:11", 1)
    calls = ModelCalls(
        pool,
        pool.attempt,
        TASK,
        trained_seeds=trained_seeds,
        free_seeds=SeedsByPrompt(KEY, FREE),
        stop_token_ids=(2,),
        timeout_s=5.0,
    )
    return calls, pool


async def make(calls):
    """Two prompts, the first of them again, freely, freely with a seed, and with an image both ways."""
    await calls.trained([1, 2, 3], 8)
    await calls.trained([1, 2, 3, 4], 8)
    await calls.trained([1, 2, 3], 8)
    await calls.free([1, 2, 3], 8, {"temperature": 0.0})
    await calls.free([1, 2, 3], 8, {"seed": 99})
    await calls.trained([1, 2, 3], 8, media=IMAGE)
    await calls.free([1, 2, 3], 8, {}, media=IMAGE)


BY_TURN = [
    8911858429941295400,
    9012677657089885916,
    6934941458225617098,
    8796236124386830745,
    99,
    2707700700771290168,
    1559451563483687183,
]
BY_PROMPT = [
    9137954095719843840,
    5000837326946249181,
    3459603186300988643,
    8796236124386830745,
    99,
    5179381034534318742,
    1559451563483687183,
]


@pytest.mark.parametrize(("seeds", "recorded"), [(SeedsByTurn(KEY), BY_TURN), (SeedsByPrompt(KEY, TRAINED), BY_PROMPT)])
def test_the_seeds_are_the_recorded_ones(seeds, recorded):
    calls, pool = calls_of(seeds)
    asyncio.run(make(calls))
    assert [sampling.seed for sampling in pool.samplings] == recorded
    assert KEY.episode_seed() == 7614297096540172361


def test_a_retry_has_other_seeds_and_the_first_attempt_those_without_a_number():
    assert replace(KEY, attempt=0) == KEY  # old runs keep their numbers
    keys = [replace(KEY, attempt=attempt) for attempt in range(4)]
    kinds = [SeedsByTurn, lambda key: SeedsByPrompt(key, TRAINED), lambda key: SeedsByPrompt(key, FREE)]
    found = [key.episode_seed() for key in keys]
    for key in keys:
        for seeds in kinds:
            numbered = seeds(key)
            found += [numbered.next([1, 2, 3], ()) for _ in range(3)]
    assert len(set(found)) == len(found) == 4 + 4 * 3 * 3
    # blake2b of "(7, 2, 11, 1, 0, 3)": train seed, epoch, position, rollout, turn, attempt.
    digest = hashlib.blake2b(b"(7, 2, 11, 1, 0, 3)", digest_size=8).digest()
    assert keys[3].call_seed(0) == int.from_bytes(digest, "little") >> 1


def test_free_calls_choose_their_sampling_and_trained_ones_do_not():
    calls, pool = calls_of(SeedsByTurn(KEY))
    asyncio.run(make(calls))
    assert [sampling.temperature for sampling in pool.samplings] == [0.7, 0.7, 0.7, 0.0, 0.7, 0.7, 0.7]
    for sampling in pool.samplings:
        assert (sampling.top_p, sampling.top_k, sampling.max_tokens, sampling.stop_token_ids) == (0.9, 5, 8, (2,))
    assert pool.media == [(), (), (), (), (), IMAGE, IMAGE]
    assert set(pool.rollouts) == {"2:11:1"}


def test_an_attempt_counts_turns_and_knows_what_it_waits_for():
    calls, pool = calls_of(SeedsByTurn(KEY))
    assert pool.attempt.state("runner0").doing == "agent"
    asyncio.run(make(calls))
    state = pool.attempt.state("runner0")
    assert pool.doing == ["engine"] * 7
    assert (state.group_id, state.index, state.runner, state.doing, state.turns) == ("2:11", 1, "runner0", "agent", 7)
    assert state.age_s >= state.silent_s >= 0


def test_a_call_with_the_same_prompt_has_the_same_seed_whichever_call_came_first():
    first, second = SeedsByPrompt(KEY, TRAINED), SeedsByPrompt(KEY, TRAINED)
    a, b = first.next([1], ()), first.next([2], ())
    assert (second.next([2], ()), second.next([1], ())) == (b, a)
