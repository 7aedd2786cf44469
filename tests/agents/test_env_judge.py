"""An `Env` with a judge: the engines of its episode under a URL, recorded nowhere."""

import asyncio

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI

from molt.agents import Env, PolicyFailure, Result, StepEnvRunner
from molt.agents.step_runner import EpisodeContext
from molt.chat.chat_renderer import ChatRenderer
from molt.chat.render import Renderer
from molt.types import InfraFailure, Prompt, Scored
from tests.streams import turn_from
from tests.tiny import END_ID, char_tokenizer

TOKENIZER = char_tokenizer()
ASK = [{"role": "user", "content": "is it good?"}]


def turn_of(text, prompt_ids):
    ids = np.asarray([*TOKENIZER.encode(text, add_special_tokens=False), END_ID], np.int32)
    logprobs, versions = np.full(len(ids), -0.5, np.float32), np.full(len(ids), 3, np.int32)
    return turn_from(np.asarray(prompt_ids, np.int32), ids, logprobs, versions, "stop")


def play(step, judged, *, judge=True, episodes=1, over=()):
    """Episodes of an `Env` whose policy says `fine`, and whose judge what `judged` answers to its sampling.

    over: URLs that must be unknown after them.
    """

    class Mine(Env):
        async def step(self, state):
            return await step(state)

    async def call_model(prompt_ids, max_tokens):
        return turn_of("fine", prompt_ids)

    async def call_freely(prompt_ids, max_tokens, sampling):
        return turn_of(judged(sampling), prompt_ids)

    async def main():
        runner, prompt = StepEnvRunner(Mine, judge=judge), Prompt(0, 0, 0, [{"role": "user", "content": "hi"}], None)
        renderer, chat = Renderer(TOKENIZER, apply_chat_template=True), ChatRenderer(TOKENIZER, [END_ID])
        context = EpisodeContext(prompt, call_model, renderer, 0, 500, chat=chat, call_freely=call_freely)
        try:
            async with asyncio.timeout(20):
                played = await asyncio.gather(*(runner.run(context) for _ in range(episodes)))
                async with httpx.AsyncClient() as client:
                    assert [(await client.get(url)).status_code for url in over] == [404] * len(over)
                return played
        finally:
            if runner._server is not None:
                await (await runner._server).__aexit__()

    return asyncio.run(main())


def test_a_judge_answers_with_its_own_sampling_and_is_gone_with_its_episode():
    seen, urls = [], []

    async def step(state):
        async with AsyncOpenAI(base_url=f"{state['judge_url']}/v1", api_key="x", max_retries=0) as client:
            said = await client.chat.completions.create(model="policy", messages=ASK, temperature=0.5)
        urls.append(state["judge_url"])
        return Result(float(said.choices[0].message.content == "yes"))

    played = play(step, lambda sampling: seen.append(sampling) or "yes", episodes=3, over=urls)
    assert [episode.outcome for episode in played] == [Scored(1.0, 1.0)] * 3
    assert seen == [{"temperature": 0.5}] * 3 and len(set(urls)) == 3
    for episode in played:  # what was judged is in no turn
        assert [TOKENIZER.decode(turn.token_ids) for turn in episode.turns] == ["fine<|im_end|>"]


@pytest.mark.parametrize("then", [Result(1.0), PolicyFailure(-1.0, "unusable")])
def test_a_judge_without_an_engine_is_a_failure_whatever_the_env_makes_of_it(then):
    def dead(sampling):
        raise InfraFailure("engine", "dead")

    async def step(state):
        async with httpx.AsyncClient() as client:  # which does not look at the status
            await client.post(f"{state['judge_url']}/v1/chat/completions", json={"model": "m", "messages": ASK})
        if isinstance(then, Exception):
            raise then
        return then

    with pytest.raises(InfraFailure, match="engine"):
        play(step, dead)


def test_without_one_there_is_none_and_no_server():
    async def step(state):
        return Result(float("judge_url" not in state))

    (episode,) = play(step, None, judge=False)
    assert episode.outcome.reward == 1.0
