"""`ChatAgentRunner` over a scripted model: what is recorded, what is not, and how an episode ends."""

import asyncio
import os
import re
import sys
import time

import httpx
import numpy as np
import psutil
import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI

from molt.agents import ChatAgent, ChatAgentRunner, PolicyFailure, Result, harness
from molt.agents.step_runner import EpisodeContext
from molt.agents.user_errors import contain_tasks
from molt.chat.chat_renderer import ChatRenderer
from molt.chat.protocol import ChatError, PolicyRefusal
from molt.errors import AgentError
from molt.types import InfraFailure, Prompt, ReplaceGroup, Scored
from tests.streams import turn_from
from tests.tiny import END_ID, char_tokenizer

TOKENIZER = char_tokenizer()
SAY = [{"role": "user", "content": "say it"}]


class Model:
    """Answers with the next of its texts; an exception in their place is raised."""

    def __init__(self, *texts):
        self.texts, self.prompts, self.free = list(texts), [], []

    async def __call__(self, prompt_ids, max_tokens, media=()):
        self.prompts.append(list(prompt_ids))
        text = self.texts.pop(0)
        if isinstance(text, Exception):
            raise text
        ids = [*TOKENIZER.encode(text, add_special_tokens=False), END_ID][:max_tokens]
        reason = "stop" if ids[-1] == END_ID else "length"
        as_array = np.asarray(ids, np.int32)
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        return turn_from(np.asarray(prompt_ids, np.int32), as_array, logprobs, np.full(len(ids), 3, np.int32), reason)

    async def freely(self, prompt_ids, max_tokens, sampling):
        self.free.append(sampling)
        return await self(prompt_ids, max_tokens)


def play(run, model, *, within_s=20.0, tools=None, **limits):
    """One episode of an agent whose `run` is the given coroutine function."""

    class Agent(ChatAgent):
        async def run(self, ctx):
            return await run(ctx)

    return play_agent(Agent, model, within_s=within_s, tools=tools, **limits)


def play_agent(agent_class, model, *, within_s=20.0, tools=None, **limits):
    """One episode of an agent."""

    async def episode():
        prompt = Prompt(0, 0, 0, messages=SAY, text=None, label="label", data_source="source", tools=tools)
        context = EpisodeContext(
            prompt, model, None, 7, limits.pop("max_len", 500), **limits,
            chat=ChatRenderer(TOKENIZER, [END_ID]), call_freely=model.freely,
        )  # fmt: skip
        runner = ChatAgentRunner(agent_class)
        async with asyncio.timeout(within_s):
            try:
                return await runner.run(context)
            finally:
                await (await runner._server).__aexit__()

    return asyncio.run(episode())


def client_of(ctx):
    return AsyncOpenAI(base_url=ctx.openai_url, api_key=ctx.api_key, max_retries=0)


async def ask(ctx, messages, **more):
    async with client_of(ctx) as client:
        reply = await client.chat.completions.create(model=ctx.model, messages=messages, **more)
    return reply.choices[0].message.content


def test_two_turns_are_one_sample_of_what_was_sampled():
    async def run(ctx):
        assert (ctx.label, ctx.data_source, ctx.seed) == ("label", "source", 7)
        first = await ask(ctx, ctx.prompt)
        second = await ask(
            ctx, [*ctx.prompt, {"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
        )
        return Result(reward=len(first + second), info={"turns": 2})

    model = Model("one", "two")
    episode = play(run, model)
    (sample,) = episode.samples
    assert TOKENIZER.decode(sample.token_ids) == (
        "<|im_start|>user\nsay it<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    )
    assert TOKENIZER.decode(sample.token_ids[sample.mask]) == "one<|im_end|>two<|im_end|>"
    assert sample.logprobs[sample.mask].tolist() == [-1, -2, -3, -4] * 2
    assert episode.outcome == Scored(6.0, 6.0) and not episode.truncated and len(episode.turns) == 2
    assert episode.info["turns"] == 2 and episode.info["chat_requests"] == 2


def test_an_answer_that_was_cut_is_truncated_and_a_score_of_its_own_counts():
    async def run(ctx):
        await ask(ctx, ctx.prompt)
        return Result(reward=0.5, score=1.0)

    episode = play(run, Model("a long answer"), max_new_tokens=4)
    assert episode.cut == "length" and episode.outcome == Scored(0.5, 1.0)


@pytest.mark.parametrize(
    ("truncated", "answer", "cut"),
    [(True, "ok", "agent"), ("time", "ok", "time"), (False, "ok", None), ("time", "a long answer", "length")],
)
def test_an_agent_says_why_it_stopped_before_the_end(truncated, answer, cut):
    async def run(ctx):
        await ask(ctx, ctx.prompt)
        return Result(reward=0.5, truncated=truncated)

    assert play(run, Model(answer), max_new_tokens=10).cut == cut


def test_what_a_judge_samples_is_in_no_sample_and_uses_its_own_sampling():
    async def run(ctx):
        answer = await ask(ctx, ctx.prompt)
        async with AsyncOpenAI(base_url=f"{ctx.judge_url}/v1", api_key="x", max_retries=0) as judge:
            said = await judge.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": f"is {answer} good?"}], temperature=0.0
            )
        return Result(reward=float(said.choices[0].message.content == "yes"))

    model = Model("fine", "yes")
    episode = play(run, model)
    assert episode.outcome.reward == 1.0 and model.free == [{"temperature": 0.0}]
    (sample,) = episode.samples
    assert TOKENIZER.decode(sample.token_ids[sample.mask]) == "fine<|im_end|>"


def test_a_judge_without_an_engine_ends_the_episode_too():
    async def run(ctx):
        answer = await ask(ctx, ctx.prompt)
        async with httpx.AsyncClient() as client:  # which does not look at the status
            await client.post(f"{ctx.judge_url}/v1/chat/completions", json={"model": "m", "messages": SAY})
        return Result(reward=len(answer))

    with pytest.raises(InfraFailure, match="engine"):
        play(run, Model("fine", InfraFailure("engine", "dead")))


def test_a_judge_may_send_what_is_not_honoured_but_not_what_does_not_exist():
    async def run(ctx):
        async with AsyncOpenAI(base_url=f"{ctx.judge_url}/v1", api_key="x", max_retries=0) as judge:
            ask = judge.chat.completions.create
            await ask(model="policy", messages=SAY, presence_penalty=0.5, top_p=0.9)
            with pytest.raises(BadRequestError, match="no such distribution"):
                await ask(model="policy", messages=SAY, temperature=-1.0)
        return Result(reward=1.0)

    model = Model("yes")
    assert play(run, model).outcome.reward == 1.0 and model.free == [{"top_p": 0.9}]


def test_an_answer_that_a_stop_string_ended_is_not_truncated_and_a_cut_title_does_not_count():
    async def run(ctx):
        assert await ask(ctx, ctx.prompt, stop=["c"], max_tokens=6) == "ab"
        title = [{"role": "system", "content": "titles"}, {"role": "user", "content": "title?"}]
        await ask(ctx, title, max_tokens=2)
        return Result(reward=1.0)

    episode = play(run, Model("abcdefgh", "a title"))
    assert not episode.truncated and episode.info["chat_side_calls"] == 1
    (sample,) = episode.samples
    assert TOKENIZER.decode(sample.token_ids[sample.mask]) == "abc"


def test_side_conversations_are_trained_if_asked_for():
    async def run(ctx):
        ctx.train_side()
        await ask(ctx, ctx.prompt)
        await ask(ctx, [{"role": "system", "content": "critic"}, {"role": "user", "content": "good?"}])
        return Result(reward=1.0)

    assert len(play(run, Model("a", "b")).samples) == 2


def ask_synchronously(ctx):
    with OpenAI(base_url=ctx.openai_url, api_key="x", max_retries=0, timeout=120) as client:
        return client.chat.completions.create(model="policy", messages=ctx.prompt)


class InThreads(ChatAgent):
    async def run(self, ctx):
        await asyncio.to_thread(ask_synchronously, ctx)
        return Result(reward=1.0)


class Plain(ChatAgent):
    def run(self, ctx):
        ask_synchronously(ctx)
        return Result(reward=1.0)


@pytest.mark.parametrize("agent", [InThreads, Plain])
def test_many_agents_with_synchronous_clients_do_not_wait_for_themselves(agent):
    async def episodes():
        runner, prompt = ChatAgentRunner(agent), Prompt(0, 0, 0, messages=SAY, text=None)
        chat = ChatRenderer(TOKENIZER, [END_ID])
        contexts = [EpisodeContext(prompt, Model("x"), None, 7, 500, chat=chat) for _ in range(40)]
        async with asyncio.timeout(110):
            done = await asyncio.gather(*(runner.run(context) for context in contexts))
        await (await runner._server).__aexit__()
        return done

    assert all(episode.outcome.reward == 1.0 for episode in asyncio.run(episodes()))


async def talk(ctx):
    """A loop of a stock client that goes on until it is refused."""
    said = list(ctx.prompt)
    while True:
        said += [{"role": "assistant", "content": await ask(ctx, said)}, {"role": "user", "content": "more"}]


def test_running_out_of_context_through_a_stock_client_is_scored_and_truncated():
    episode = play(talk, Model(*["x" * 20] * 9), max_len=100)
    assert episode.outcome == Scored(0.0, 0.0) and episode.cut == "length"
    assert len(episode.samples) == 1 and len(episode.turns) >= 2 and episode.info["chat_out_of_context"] == 1


@pytest.mark.parametrize(
    ("texts", "max_len", "then", "error"),
    [
        ([], 10, None, ReplaceGroup),  # not even the first prompt fits: nothing was ever tried
        (["x"], 500, RuntimeError("sandbox"), RuntimeError),  # nothing was refused
        (["x" * 20] * 9, 100, InfraFailure("sandbox"), InfraFailure),
        (["x" * 20] * 9, 100, ReplaceGroup("stale_task"), ReplaceGroup),
        (["x", InfraFailure("engine", "dead")], 500, None, InfraFailure),
    ],
)
def test_other_errors_are_none_of_the_context(texts, max_len, then, error):
    async def run(ctx):
        try:
            await (ask(ctx, ctx.prompt) if isinstance(then, RuntimeError) else talk(ctx))
        except BadRequestError:
            if then is None:
                raise
        raise then

    with pytest.raises(error):
        play(run, Model(*texts), max_len=max_len)


def test_an_error_after_an_answer_that_followed_a_refusal_is_none_of_the_context():
    async def run(ctx):
        with pytest.raises(BadRequestError):
            await talk(ctx)
        await ask(ctx, ctx.prompt)  # compacted, it fits
        raise ConnectionError("the sandbox is dead")

    with pytest.raises(ConnectionError):
        play(run, Model(*["x" * 20] * 9), max_len=100)


def test_an_agent_whose_last_prompt_was_refused_is_scored_as_it_says_and_truncated():
    """As with a harness, which ends as if all were well."""

    async def run(ctx):
        with pytest.raises(BadRequestError):
            await talk(ctx)
        return Result(reward=1.0)

    episode = play(run, Model(*["x" * 20] * 9), max_len=100)
    assert episode.outcome == Scored(1.0, 1.0) and episode.cut == "length"
    assert [words for words in episode.refusals if "prompt is too long" in words]


@pytest.mark.parametrize("then", [{"train": True}, {"train": False}])
def test_only_a_trained_answer_says_that_the_context_has_room_again(then):
    """A compacted conversation goes on; a call that opted out of training says nothing of the conversation."""

    async def run(ctx):
        with pytest.raises(BadRequestError):
            await talk(ctx)
        headers = {} if then["train"] else {"x-molt-train": "0"}
        async with AsyncOpenAI(base_url=ctx.openai_url, api_key="x", max_retries=0) as client:
            await client.chat.completions.create(model="policy", messages=ctx.prompt, extra_headers=headers)
        return Result(reward=1.0)

    episode = play(run, Model(*["x" * 20] * 9), max_len=100)
    assert episode.cut == (None if then["train"] else "length")


def test_a_title_that_fits_does_not_hide_that_the_conversation_did_not():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

    async def run(ctx):
        async with AsyncOpenAI(base_url=ctx.openai_url, api_key="x", max_retries=0) as client:
            create = client.chat.completions.create
            await create(model="policy", messages=[{"role": "user", "content": "go"}], tools=tools)
            with pytest.raises(BadRequestError):
                await create(model="policy", messages=[{"role": "user", "content": "x" * 900}], tools=tools)
            title = [{"role": "system", "content": "title"}, {"role": "user", "content": "t"}]
            await create(model="policy", messages=title)
        return Result(reward=1.0)

    assert play(run, Model("a", "b"), max_len=800).cut == "length"


def test_the_context_length_is_told():
    async def run(ctx):
        return Result(reward=float(ctx.max_len))

    assert play(run, Model(), max_len=123).outcome.reward == 123.0


def test_a_first_prompt_that_does_not_fit_replaces_the_group():
    async def run(ctx):
        await ask(ctx, ctx.prompt)

    with pytest.raises(ReplaceGroup) as replaced:
        play(run, Model(), max_len=10)
    assert replaced.value.reason == "prompt_too_long" and "tokens > 10 maximum" in replaced.value.detail


@pytest.mark.parametrize("sampled", [True, False])
def test_a_refusal_for_what_the_policy_sampled_is_its_failure(sampled):
    """An image's token in an answer: no client could go on. What the client does is not."""

    async def run(ctx):
        await ask(ctx, ctx.prompt)

        async def refuse(request):
            raise (PolicyRefusal if sampled else ChatError)(400, "invalid_request", "the token of an image")

        ctx.session._prompt = refuse
        await ask(ctx, ctx.prompt)

    if not sampled:
        with pytest.raises(BadRequestError):
            play(run, Model("x"))
        return
    episode = play(run, Model("x"))
    assert type(episode.outcome) is PolicyFailure and episode.outcome.reward == 0.0
    assert "the token of an image" in episode.outcome.reason and len(episode.samples) == 1


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
@pytest.mark.parametrize("how", ["async", "plain", "in a task"])
def test_an_exit_in_a_chat_agent_is_a_failure_and_ends_no_loop(error, how):
    class Exits(ChatAgent):
        async def run(self, ctx):
            await ask(ctx, ctx.prompt)
            raise error

    class PlainExits(ChatAgent):
        def run(self, ctx):
            raise error

    class TaskExits(ChatAgent):
        async def run(self, ctx):
            contain_tasks(asyncio.get_running_loop())  # as a runner does
            await asyncio.gather(Exits().run(ctx), asyncio.sleep(0))

    agent = {"async": Exits, "plain": PlainExits, "in a task": TaskExits}[how]
    with pytest.raises(InfraFailure, match=type(error).__name__):
        play_agent(agent, Model("x"))


def test_what_an_agent_does_to_what_it_is_given_stays_its_own():
    async def run(ctx):
        ctx.tools.append("mine")
        ctx.prompt.append("mine")
        return Result(reward=1.0)

    play(run, Model(), tools=(tools := [{"type": "function"}]))
    assert tools == [{"type": "function"}] and SAY == [{"role": "user", "content": "say it"}]


def test_turns_keep_no_prompt_alive():
    async def run(ctx):
        await ask(ctx, ctx.prompt)
        return Result(reward=1.0)

    (turn,) = play(run, Model("x")).turns
    assert len(turn.prompt_ids) == 0 and turn.prompt_ids.base is None


def test_branches_can_be_left_out():
    async def run(ctx):
        await ask(ctx, ctx.prompt)
        await ask(ctx, [{"role": "user", "content": "another"}])
        ctx.exclude(lambda node: any("another" in str(said["content"]) for said in node.messages))
        return Result(reward=1.0)

    (sample,) = play(run, Model("kept", "left out")).samples
    assert "kept" in TOKENIZER.decode(sample.token_ids)


def test_a_policy_failure_keeps_what_was_sampled():
    class Mine(PolicyFailure):
        pass

    async def run(ctx):
        await ask(ctx, ctx.prompt)
        raise Mine(-1.0, "nonsense")

    episode = play(run, Model("gibberish"))
    assert type(episode.outcome) is PolicyFailure and episode.outcome.reward == -1.0 and len(episode.samples) == 1


def test_an_engine_failure_ends_the_episode_at_once_whatever_the_client_does():
    async def run(ctx):
        while True:  # a client that retries for ever
            async with httpx.AsyncClient() as client:
                await client.post(f"{ctx.openai_url}/chat/completions", json={"model": "m", "messages": ctx.prompt})
            await asyncio.sleep(0.05)

    began = time.monotonic()
    with pytest.raises(InfraFailure, match="engine"):
        play(run, Model(InfraFailure("engine", "dead")))
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("returned", "error", "said"),
    [
        (1.0, AgentError, r"Agent.run \(.*test_chat_runner.py:\d+\) returned a float"),
        (Result(reward=float("nan")), InfraFailure, "returned reward nan"),
    ],
)
def test_a_result_that_is_none_is_told(returned, error, said):
    async def run(ctx):
        return returned

    with pytest.raises(error, match=said):
        play(run, Model())


class Misspelt(ChatAgent):
    async def runn(self, ctx):
        return Result(1.0)


class WithoutContext(ChatAgent):
    def run(self):
        return Result(1.0)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (Misspelt, r"Misspelt \(.*test_chat_runner.py:\d+\) defines no `async def run.*Did you mean 'runn'\?"),
        (
            WithoutContext,
            r"WithoutContext.run \(.*test_chat_runner.py:\d+\) cannot be called.*Write `async def run\(self, c",
        ),
    ],
)
def test_a_chat_agent_without_run_is_told(agent, said):
    with pytest.raises(AgentError, match=said):
        play_agent(agent, Model())


HARNESS = """
import json, os, urllib.request
body = json.dumps({"model": "policy", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}).encode()
request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", body,
    {"content-type": "application/json", "x-api-key": os.environ["ANTHROPIC_API_KEY"]})
print(json.load(urllib.request.urlopen(request))["content"][0]["text"] + input())
"""


def test_a_harness_finds_the_session_in_its_environment():
    async def run(ctx):
        done = await ctx.harness(sys.executable, "-c", HARNESS, stdin="!\n", timeout_s=15)
        assert done.returncode == 0, done.stderr
        return Result(reward=float(done.stdout == "hi there!\n"))

    episode = play(run, Model("hi there"))
    assert episode.outcome.reward == 1.0 and len(episode.samples) == 1


SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "DATABASE_URL", "PGPASSWORD")


def test_a_harness_gets_no_secrets(monkeypatch):
    """A model writes what it runs; an allow-list also holds back what nobody thought of."""
    for name in SECRETS:
        monkeypatch.setenv(name, "secret-1")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret-1@proxy:3128")
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "internal.example")
    monkeypatch.setenv("LC_TIME", "C")
    monkeypatch.setenv("OPENAI_API_KEY", "secret-1")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere")

    async def run(ctx):
        given = {"GITHUB_TOKEN": "given", "MINE": "1"}
        done = await ctx.harness("env", env=given, timeout_s=15)
        assert "secret-1" not in done.stdout
        lines = set(done.stdout.splitlines())
        assert {"GITHUB_TOKEN=given", "MINE=1", "LC_TIME=C", "http_proxy=http://proxy:3128"} <= lines
        assert {f"OPENAI_BASE_URL={ctx.openai_url}", f"PATH={os.environ['PATH']}"} <= lines
        assert "NO_PROXY=internal.example,127.0.0.1,localhost" in lines
        return Result(reward=1.0)

    assert play(run, Model()).outcome.reward == 1.0


def test_a_harness_that_leaves_a_child_behind_has_ended():
    async def run(ctx):
        done = await ctx.harness("bash", "-c", "sleep 600 & echo hi; exit 3", timeout_s=20)
        assert (done.returncode, done.stdout, done.timed_out) == (3, "hi\n", False)
        return Result(reward=1.0)

    assert play(run, Model()).outcome.reward == 1.0


def test_of_endless_output_the_beginning_and_the_end_are_kept():
    size = 6 * harness.KEPT_BYTES

    async def run(ctx):
        done = await ctx.harness("bash", "-c", f"echo begun; head -c {size} /dev/zero | tr '\\0' x; echo; echo ended")
        assert done.stdout.startswith("begun\nxx") and done.stdout.endswith("xx\nended\n")
        kept = len(done.stdout)
        dropped = int(re.search(r"\n\.\.\. ([\d,]+) bytes \.\.\.\n", done.stdout)[1].replace(",", ""))
        assert kept < 3.1 * harness.KEPT_BYTES and done.stdout.count("x") + dropped == size
        return Result(reward=1.0)

    assert play(run, Model()).outcome.reward == 1.0


@pytest.mark.parametrize("how", ["", "trap '' TERM; ", "setsid "])
def test_a_harness_that_hangs_is_ended_with_all_it_started(how, tmp_path):
    async def run(ctx):
        script = f"echo begun; {how}sleep 600 & echo $! > {tmp_path}/child; sleep 600"
        done = await ctx.harness("bash", "-c", script, timeout_s=3)
        assert done.stdout == "begun\n"
        return Result(reward=float(done.timed_out))

    assert play(run, Model()).outcome.reward == 1.0
    assert not is_alive(int((tmp_path / "child").read_text()))


def is_alive(pid: int) -> bool:
    # Where nobody reaps orphans, one that is dead is still there as a zombie.
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("how", ["env -i setsid sleep 600 & sleep 600", "setsid sleep 600 &"])
def test_what_clears_its_environment_or_loses_its_parent_is_ended_too(how, tmp_path):
    """Also where `env` replaces the URLs that the session gives."""

    async def run(ctx):
        script = how.replace("sleep 600 &", f"bash -c 'echo $$ > {tmp_path}/child; exec sleep 600' &", 1)
        script += f" while [ ! -s {tmp_path}/child ]; do sleep 0.05; done" * how.endswith("&")
        await ctx.harness("bash", "-c", script, env={"ANTHROPIC_BASE_URL": "http://other"}, timeout_s=3)
        return Result(reward=1.0)

    play(run, Model())
    assert not is_alive(int((tmp_path / "child").read_text()))


def test_one_harness_of_a_session_does_not_end_another():
    async def run(ctx):
        slow = asyncio.create_task(ctx.harness("bash", "-c", "setsid sleep 1; echo done", timeout_s=15))
        await asyncio.sleep(0.3)
        await ctx.harness("true", timeout_s=15)
        return Result(reward=float((await slow).stdout == "done\n"), info={"exit": (await slow).returncode})

    assert play(run, Model()).outcome.reward == 1.0


def test_sessions_of_finished_episodes_are_unknown():
    urls = []

    async def run(ctx):
        urls.append(ctx.openai_url)
        return Result(reward=0.0)

    async def late():
        class Agent(ChatAgent):
            async def run(self, ctx):
                return await run(ctx)

        runner = ChatAgentRunner(Agent)
        prompt = Prompt(0, 0, 0, messages=SAY, text=None)
        model = Model("x")
        await runner.run(EpisodeContext(prompt, model, None, 7, 500, chat=ChatRenderer(TOKENIZER, [END_ID])))
        async with httpx.AsyncClient() as client:
            reply = await client.post(f"{urls[0]}/chat/completions", json={"model": "m", "messages": SAY})
        await (await runner._server).__aexit__()
        assert reply.status_code == 404 and not model.prompts

    asyncio.run(late())
