"""The session: what is recorded, replayed, refused, and what ends it."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from molt.chat.off_loop import LIGHT_BYTES, LIGHT_TEXT
from molt.chat.protocol import ChatError, ChatRequest
from molt.chat.reading import read_turn
from molt.chat.session import RETRY, Session, echo_of
from molt.errors import StructureError
from molt.types import InfraFailure
from tests.chat.scripted import VERSION, ScriptedModel, ids_of, renderer, text_of, turn_of

HI = ChatRequest([{"role": "user", "content": "hi"}])
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
RETRIED = replace(HI, hints={RETRY: "1"})
TURN_TOKENS = len(ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))


def session_of(*script, **settings) -> Session:
    return Session(renderer(), ScriptedModel(*script), **{"max_len": 4000, **settings})


def contents(reply) -> list[str]:
    return [answer.content for answer in reply.answers]


def refused(session: Session, request: ChatRequest = HI) -> ChatError:
    with pytest.raises(ChatError) as caught:
        asyncio.run(session.answer(request))
    return caught.value


def test_a_conversation_is_one_segment_of_exactly_what_the_engine_saw():
    session = session_of("one", "two")

    async def run():
        await session.answer(HI)
        said = [*HI.messages, {"role": "assistant", "content": "one"}, {"role": "user", "content": "and"}]
        return await session.answer(ChatRequest(said))

    reply = asyncio.run(run())
    (sample,) = session.tree.samples()
    assert text_of(sample.token_ids) == session.call_model.prompts[1] + "two<|im_end|>"
    assert session.call_model.prompts[1].startswith(session.call_model.prompts[0] + "one<|im_end|>\n")
    assert reply.prompt_tokens == len(sample.token_ids) - len("two") - 1
    assert (sample.versions[sample.mask] == VERSION).all() and int(sample.mask.sum()) == 4 + 4


@given(text=st.text("ab.", max_size=40), stops=st.lists(st.text("ab.", min_size=1, max_size=3), min_size=1, max_size=3))
@example(text="aab", stops=["b", "ab"])  # complete in the same token: the one that begins first
def test_a_turn_is_cut_at_the_token_in_which_the_first_stop_string_completes(text, stops):
    read = read_turn(renderer(), turn_of(text), [], replace(HI, stop=tuple(stops)))
    turn, answer = read.turn, read.answer
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if not ends:  # one token per character, and one that ends the turn
        assert (len(turn.token_ids), answer.stop_sequence, answer.content) == (len(text) + 1, None, text)
        return
    done = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
    assert text_of(turn.token_ids) == text[: ends[0]] == answer.content + done
    assert (answer.stop_sequence, answer.completion_tokens) == (done, ends[0])
    assert (turn.logprobs == -np.arange(1, ends[0] + 1)).all() and len(turn.versions) == ends[0]
    assert turn.finish_reason == answer.finish_reason == "stop"


def test_after_a_stop_string_the_conversation_goes_on_from_the_exact_ids():
    session = session_of("one STOP two", "three")

    async def run():
        await session.answer(replace(HI, stop=("STOP",)))
        said = [*HI.messages, {"role": "assistant", "content": "one "}, {"role": "user", "content": "and"}]
        await session.answer(ChatRequest(said))

    asyncio.run(run())
    assert "assistant\none STOP<|im_end|>\n<|im_start|>user\nand" in session.call_model.prompts[1]
    assert len(session.tree.samples()) == 1


async def reply_to(session: Session, request: ChatRequest, *, left: bool = False) -> list[str]:
    """What the client got; `left`: what it would have got, had it not gone away when it was there."""
    reply = await (work := session.ask(request, "key")).task
    if left:
        session.leave(work)
    return contents(reply)


def test_an_equal_request_after_a_delivered_reply_is_a_new_sample():
    session = session_of("one", "two")

    async def run():
        return [await reply_to(session, HI) for _ in range(2)]

    assert asyncio.run(run()) == [["one"], ["two"]]
    assert len(session.tree.samples()) == 2


def test_a_lost_reply_is_replayed_until_it_is_delivered():
    session = session_of("one", "two")

    async def run():
        return [await reply_to(session, HI, left=left) for left in (True, True, False, False)]

    assert asyncio.run(run()) == [["one"], ["one"], ["one"], ["two"]]
    assert len(session.tree.samples()) == 2 and session.counters["replayed"] == 2


def test_of_equal_parallel_calls_each_lost_reply_is_replayed_once():
    session = session_of("one", "two", "three")

    async def run():
        works = [session.ask(HI, "key") for _ in range(2)]
        await asyncio.wait([work.task for work in works])
        for work in works:
            session.leave(work)
        return [await reply_to(session, HI) for _ in range(3)]

    *replayed, new = asyncio.run(run())
    assert sorted(replayed) == [["one"], ["two"]] and new == ["three"] and len(session.tree.samples()) == 3


def test_a_numbered_retry_replays_even_what_seemed_delivered():
    session = session_of("one", "two")

    async def run():
        return [await reply_to(session, request) for request in (HI, RETRIED, HI)]

    assert asyncio.run(run()) == [["one"], ["one"], ["two"]]


def test_a_retry_of_a_refused_repetition_does_not_get_the_older_reply():
    """Equal bodies: the first answered, the second (a new sample) refused over the cap; its retry is refused too."""
    session = session_of("one", "two", max_requests=1)

    async def run():
        await reply_to(session, HI)
        for request in (HI, RETRIED):
            with pytest.raises(ChatError) as caught:
                await reply_to(session, request)
            assert caught.value.status == 429

    asyncio.run(run())
    assert len(session.tree.nodes) == 1 and not any(session._works.values())


def test_a_request_that_nobody_wants_any_more_leaves_nothing():
    session = session_of("one")
    session.call_model.gate.clear()

    async def run():
        work = session.ask(HI, "key")
        await session.call_model.called.wait()
        session.leave(work)
        again = session.ask(RETRIED, "key")  # in the same instant: not what is being stopped
        session.call_model.gate.set()
        return await again.task

    assert contents(asyncio.run(run())) == ["one"]
    assert session.call_model.cancelled == 1 and len(session.tree.nodes) == 1


def test_a_numbered_retry_of_a_call_under_way_waits_for_it_and_it_goes_on_when_the_first_connection_ends():
    session = session_of("one", "two")
    session.call_model.gate.clear()

    async def run():
        first, again = session.ask(HI, "key"), session.ask(RETRIED, "key")
        assert again is first
        await session.call_model.called.wait()
        session.leave(first)
        session.call_model.gate.set()
        return contents(await again.task), await reply_to(session, HI)

    # Delivered to the second connection, so the next equal request is no retry.
    assert asyncio.run(run()) == (["one"], ["two"]) and session.call_model.cancelled == 0


def test_equal_parallel_calls_that_are_all_tried_again_do_not_share_a_sample():
    session = session_of("one", "two")
    session.call_model.gate.clear()

    async def run():
        for work in [session.ask(HI, "key") for _ in range(2)]:
            session.leave(work)
        works = [session.ask(RETRIED, "key") for _ in range(2)]
        session.call_model.gate.set()
        return [contents(await work.task) for work in works]

    assert sorted(asyncio.run(run())) == [["one"], ["two"]] and len(session.tree.samples()) == 2


@pytest.mark.parametrize("said, size, light", [(1, 0, True), (LIGHT_TEXT + 1, 0, False), (1, LIGHT_BYTES + 1, False)])
def test_only_a_short_turn_is_rendered_on_the_event_loop(said, size, light):
    session, threads = session_of("one", "two"), []
    bridge = session.renderer.bridge

    def seen(*args, **settings):
        threads.append(threading.current_thread())
        return bridge(*args, **settings)

    async def run():
        await session.answer(HI)
        session.renderer.bridge = seen
        said_now = [{"role": "assistant", "content": "one"}, {"role": "user", "content": "x" * said}]
        await session.answer(replace(HI, messages=[*HI.messages, *said_now], size=size))

    try:
        asyncio.run(run())
    finally:
        del session.renderer.bridge
    assert [thread is threading.main_thread() for thread in threads] == [light]


def test_room_and_limits_bound_the_sampled_tokens():
    limits = []

    async def call_model(ids, max_tokens):
        limits.append(max_tokens)
        return turn_of("x", ids)

    session = Session(renderer(), call_model, max_len=TURN_TOKENS + 50, max_new_tokens=30)
    for asked in (None, 20, 40):
        asyncio.run(session.answer(replace(HI, max_tokens=asked)))
    session.max_new_tokens = None
    asyncio.run(session.answer(replace(HI, max_tokens=32_000)))
    assert limits == [30, 20, 30, 50]


def test_a_prompt_that_leaves_no_room_is_refused():
    assert asyncio.run(session_of("x", max_len=TURN_TOKENS + 1).answer(HI)).prompt_tokens == TURN_TOKENS
    error = refused(session_of(max_len=TURN_TOKENS))
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert error.message == f"prompt is too long: {TURN_TOKENS} tokens > {TURN_TOKENS} maximum"


@pytest.mark.parametrize("error", [InfraFailure("engine", "3 attempts failed"), TimeoutError("late")])
def test_a_failure_of_the_engine_ends_the_session(error):
    session = session_of(error, "one")
    first = refused(session)
    assert (first.status, first.code) == (503, "engine") and str(error.args[-1]) in first.message
    assert isinstance(session.failure, InfraFailure) and session.failed.is_set()
    assert session.failure.reason == ("engine" if isinstance(error, InfraFailure) else "TimeoutError")
    assert refused(session).code == "engine" and session.call_model.script == ["one"]  # not even asked again
    assert session.tree.nodes == []


def test_of_n_answers_with_one_failure_none_is_recorded():
    session = session_of("one", InfraFailure("engine"))
    assert refused(session, replace(HI, n=2)).code == "engine" and session.tree.nodes == []


def test_a_strict_session_refuses_constraints_of_trained_calls():
    session = session_of("one", strict=True)
    error = refused(session, replace(HI, required_tools=["f"]))
    assert error.status == 400 and "`tool_choice`" in error.message and "x-molt-train" not in error.message
    assert session.failure is None and session.call_model.prompts == []


def test_a_structure_that_the_engine_cannot_enforce_is_the_clients_doing():
    async def freely(ids, max_tokens, sampling):
        raise StructureError("no such grammar")

    session = session_of("one", call_freely=freely)
    error = refused(session, replace(HI, structure={"json": {}}, train=False))
    assert error.status == 400 and "no such grammar" in error.message
    assert session.failure is None and contents(asyncio.run(session.answer(HI))) == ["one"]


@pytest.mark.parametrize("counting", [True, False])
def test_what_cannot_be_rendered_is_the_clients_doing_and_the_session_lives_on(counting):
    session = session_of("one", "two")
    asyncio.run(session.answer(HI))
    tool = {"role": "tool", "content": "x", "tool_call_id": ["no", "text"]}
    odd = ChatRequest([*HI.messages, {"role": "assistant", "content": "one"}, tool])
    with pytest.raises(ChatError, match="could not be rendered") as caught:
        asyncio.run(session.count(odd) if counting else session.answer(odd))
    assert caught.value.status == 400 and session.failure is None and not session.failed.is_set()
    assert contents(asyncio.run(session.answer(HI))) == ["two"]


def test_nothing_can_be_asked_once_the_session_is_closed():
    session = session_of("one")

    async def run():
        session.close()
        session.ask(HI, "key")

    with pytest.raises(ChatError, match="is over") as caught:
        asyncio.run(run())
    assert caught.value.status == 404


def test_what_is_rendered_anew_keeps_the_reasoning_that_the_client_dropped():
    session = session_of('<think>\nhm\n</think>\n\none<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "two")

    async def run():
        (answer,) = (await session.answer(replace(HI, tools=TOOLS))).answers
        echo = replace(answer, reasoning=None)
        said = [*HI.messages, echo_of(echo), {"role": "tool", "content": "r", "tool_call_id": answer.tool_calls[0].id}]
        await session.answer(ChatRequest([*said, {"role": "assistant", "content": "the client's own"}], tools=TOOLS))

    asyncio.run(run())
    assert "the client's own" in session.call_model.prompts[1] and "hm" in session.call_model.prompts[1]


def test_equal_calls_that_were_delivered_are_each_retried_once():
    session = session_of("one", "two", "three")

    async def run():
        works = [session.ask(HI, "key") for _ in range(2)]
        first = [contents(await work.task) for work in works]
        return first, [await reply_to(session, RETRIED) for _ in range(2)]

    first, again = asyncio.run(run())
    assert first == again and len(session.tree.samples()) == 2


def test_sampling_of_the_client_is_ignored_and_counted_where_it_is_trained():
    session = session_of("one")
    asyncio.run(session.answer(replace(HI, sampling={"temperature": 0.0, "top_p": 1.0}, seed=0)))
    assert {k: v for k, v in session.counters.items() if k.startswith("ignored")} == {
        "ignored_temperature": 1,
        "ignored_top_p": 1,
        "ignored_seed": 1,
    }


def test_a_call_that_opts_out_is_sampled_as_the_client_likes_and_stays_context():
    asked = []

    async def freely(ids, max_tokens, sampling):
        asked.append(sampling)
        return turn_of("free", ids)

    session = session_of("one", call_freely=freely)

    async def run():
        await session.answer(replace(HI, sampling={"temperature": 0.0}, seed=5, train=False))
        said = [*HI.messages, {"role": "assistant", "content": "free"}, {"role": "user", "content": "and"}]
        await session.answer(ChatRequest(said))

    asyncio.run(run())
    assert asked == [{"temperature": 0.0, "seed": 5}] and not session.counters["ignored_temperature"]
    (sample,) = session.tree.samples()
    assert text_of(sample.token_ids[sample.mask]) == "one<|im_end|>"


def test_a_judge_records_nothing():
    session = session_of("one", "two", record=False)

    async def run():
        return [contents(await session.answer(replace(HI, train=False))) for _ in range(2)]

    assert asyncio.run(run()) == [["one"], ["two"]] and session.tree.nodes == []


def test_the_cap_counts_answers():
    session = session_of("1", "2", "3", max_requests=3)
    asyncio.run(session.answer(replace(HI, n=2)))
    asyncio.run(session.answer(HI))
    assert (refused(session).status, session.failure) == (429, None)


def test_the_cap_counts_only_what_is_sampled():
    session = session_of("1", "2", max_requests=2)
    asyncio.run(session.answer(HI))
    assert refused(session, replace(HI, n=2)).status == 429
    assert refused(session, replace(HI, messages=[{"role": "user", "content": "x" * 5000}])).status == 400
    assert contents(asyncio.run(session.answer(HI))) == ["2"] and session.counters["requests"] == 2


def test_a_malformed_call_reaches_the_client_as_text_and_is_counted():
    session = session_of('<tool_call>{"name": </tool_call>')
    reply = asyncio.run(session.answer(HI))
    assert contents(reply) == ['<tool_call>{"name": </tool_call>'] and session.counters["malformed_calls"] == 1
    assert reply.answers[0].finish_reason == "stop"


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_call_of_what_is_not_offered_is_text(tools):
    said = '<think>\nhm\n</think>\n\nso: <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    (answer,) = asyncio.run(session_of(said).answer(replace(HI, tools=tools))).answers
    if tools:
        assert (answer.content, answer.finish_reason) == ("so:", "tool_calls") and answer.tool_calls[0].name == "f"
    else:
        assert answer.content == 'so: <tool_call>{"name": "f", "arguments": {}}</tool_call>'
        assert (answer.reasoning, answer.tool_calls, answer.finish_reason) == ("hm", (), "stop")


def test_n_answers_with_a_seed_are_n_samples():
    asked = []

    async def freely(ids, max_tokens, sampling):
        asked.append(sampling["seed"])
        return turn_of("free", ids)

    session = session_of(call_freely=freely)
    for seed in (5, 2**64 - 2):
        asyncio.run(session.answer(replace(HI, seed=seed, train=False, n=3)))
    assert asked == [5, 6, 7, 2**64 - 2, 2**64 - 1, 2**64 - 1]


def test_parallel_sub_agents_are_one_segment_each():
    """Two agents with their own system prompts and a tool, three turns each, interleaved."""
    tools = TOOLS

    async def run():
        texts = iter("abcdef")

        async def call_model(ids, max_tokens):
            await asyncio.sleep(0)
            return turn_of(next(texts), ids)

        session = Session(renderer(), call_model, max_len=4000)

        async def agent(name):
            said = [{"role": "system", "content": name}, {"role": "user", "content": "go"}]
            for _ in range(3):
                (answer,) = (await session.answer(ChatRequest(said, tools))).answers
                said = [*said, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "on"}]

        await asyncio.gather(agent("one"), agent("two"))
        return session.tree.samples()

    samples = asyncio.run(run())
    assert len(samples) == 2 and [int(sample.mask.sum()) for sample in samples] == [6, 6]
