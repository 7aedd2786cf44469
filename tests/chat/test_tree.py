"""The token tree: requests land where they go on, and what is trained is what was sampled, once."""

import gc
import json
import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.chat.tree import Tree
from molt.columns import Column
from tests.streams import turn_from

TOOLS = [{"type": "function", "function": {"name": "sh", "parameters": {"type": "object", "properties": {}}}}]
SYSTEM = {"role": "system", "content": "You are an agent."}


def user(content):
    return {"role": "user", "content": content}


def said(content="", reasoning=None, calls=(), ids=()):
    """An assistant message; `calls`: (name, argument text)."""
    message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        ids = ids or [f"c{i}" for i in range(len(calls))]
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in zip(ids, calls, strict=True)
        ]
    return message


def result(content, call="c0"):
    return {"role": "tool", "content": content, "tool_call_id": call}


TWICE = Column("twice", "int64", fill=-1)


class Engine:
    """Samples tokens that never occur twice, 1000, 1001, ..., each with a log-prob of its own."""

    def __init__(self):
        self.turns, self.next, self.version = [], 1000, 7

    def sample(self, prompt_ids, count=2):
        ids = np.arange(self.next, self.next + count, dtype=np.int32)
        self.next += count
        versions = np.full(count, self.version, np.int32)
        turn = turn_from(np.array(prompt_ids, np.int32), ids, -ids.astype(np.float32) / 4096, versions, "stop")
        turn = replace(turn, sampled=turn.sampled.with_column(TWICE, 2 * ids))
        self.turns.append(turn)
        return turn


class Chat:
    """A session without HTTP: messages are ids by order of appearance, what was sampled is never rendered again."""

    def __init__(self, **kwargs):
        self.tree, self.engine, self.known = Tree(**kwargs), Engine(), {}

    def render(self, messages):
        return [self.known.setdefault(json.dumps(m, sort_keys=True), len(self.known) + 1) for m in messages]

    def ask(self, messages, reply=None, tools=TOOLS, whole=False, **kwargs):
        match = self.tree.match(messages, tools)
        prompt = self.render(messages) if whole else [*self.tree.ids(match.node).tolist(), *self.render(match.rest)]
        return self.tree.add(
            match, prompt, self.engine.sample(prompt), reply or said(f"reply {self.engine.next}"), **kwargs
        )

    def segments(self):
        """Of every sample: its ids, those that are trained marked by a minus."""
        return [
            [-i if trained else i for i, trained in zip(s.token_ids.tolist(), s.mask, strict=True)]
            for s in self.tree.samples()
        ]


def history(node, *messages):
    """The conversation as its client holds it after the call, plus what it adds."""
    return [message for n in node.path for message in n.messages] + list(messages)


# One conversation ----------------------------------------------------------------------------------------------------


def test_a_conversation_is_one_segment_of_exactly_what_the_engine_saw():
    chat = Chat()
    a = chat.ask([SYSTEM, user("hi")], said("yes"))
    chat.engine.version = 8
    b = chat.ask(history(a, user("and?")), said("no"))
    assert (a.reason, b.reason, b.parent) == ("root", "", a)
    # system 1, user 2, sampled 1000 1001, user 3, sampled 1002 1003: the echo of the reply (`yes`) is not rendered
    assert chat.segments() == [[1, 2, -1000, -1001, 3, -1002, -1003]]
    (sample,) = chat.tree.samples()
    assert sample.versions.tolist() == [-1, -1, 7, 7, -1, 8, 8]
    assert sample.logprobs.tolist() == [0, 0, -1000 / 4096, -1001 / 4096, 0, -1002 / 4096, -1003 / 4096]
    assert [sample.token_ids.dtype, sample.versions.dtype, sample.logprobs.dtype] == [np.int32, np.int32, np.float32]
    assert chat.tree.ids(b).dtype == np.int32 and chat.tree.ids(chat.tree.root).tolist() == []


def test_an_empty_tree_and_a_match_alone_record_nothing():
    tree = Tree()
    match = tree.match([user("hi")])
    assert (match.node, match.rest, match.reason) == (tree.root, [user("hi")], "root")
    assert tree.samples() == [] and tree.nodes == [] and tree.show(str) == ""


def test_two_tool_results_in_one_request_both_reach_the_model():
    chat = Chat()
    a = chat.ask([SYSTEM, user("hi")], said(calls=[("sh", "{}"), ("sh", "{}")]))
    both = [result("one", "c0"), result("two", "c1")]
    match = chat.tree.match(history(a, *both), TOOLS)
    assert (match.node, match.rest, match.reason) == (a, both, "")


def test_assistant_turns_that_the_model_never_said_are_context():
    chat = Chat()
    chat.ask([user("1+1"), said("2"), user("2+2")])
    assert chat.segments() == [[1, 2, 3, -1000, -1001]]


def test_a_turn_that_was_sampled_from_another_prompt_is_refused():
    tree, engine = Tree(), Engine()
    with pytest.raises(AssertionError, match="another prompt"):
        tree.add(tree.match([user("hi")]), [1, 2], engine.sample([1, 3]), said("x"))
    assert tree.nodes == []


# Echoes --------------------------------------------------------------------------------------------------------------

REPLY = said("It is\n  so. ", "let me\nsee", [("sh", '{"a": [1, true], "b": "x"}')])


def changed(**values):
    return {key: value for key, value in (REPLY | values).items() if value is not None}


def called(arguments, name="sh"):
    return changed(tool_calls=[{"id": "other", "type": "function", "function": {"name": name, "arguments": arguments}}])


def test_a_dropped_tree_is_gone_without_the_garbage_collector():
    chat = Chat()
    node = chat.ask([SYSTEM, user("hi")], REPLY)
    chat.ask([SYSTEM, user("hi"), REPLY, result("ok")], REPLY)
    gone = weakref.ref(node)
    gc.disable()
    try:
        del chat, node
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "echo",
    [
        changed(reasoning_content=None),
        changed(reasoning_content="let me see "),
        changed(content="It is so."),
        changed(content=[{"type": "text", "text": "It is\n  so. ", "cache_control": {"type": "ephemeral"}}]),
        changed(content=[{"type": "text", "text": "It is"}, {"type": "text", "text": "so."}]),
        called('{"b":"x","a":[1.0,true]}'),
        changed(refusal=None, annotations=[]),
    ],
)
def test_an_echo_that_means_the_same_is_no_edit(echo):
    chat = Chat()
    a = chat.ask([SYSTEM, user("hi")], REPLY)
    match = chat.tree.match([SYSTEM, user("hi"), echo, result("ok")], TOOLS)
    assert (match.node, match.rest, match.reason) == (a, [result("ok")], "")
    assert chat.tree.messages(match.node)[-1] == REPLY  # what a rendering of the whole should use


@pytest.mark.parametrize(
    "echo",
    [
        changed(content="It is not so."),
        changed(content=None),
        changed(content=[{"type": "text", "text": "It is so."}, {"type": "image_url", "image_url": {"url": "data:x"}}]),
        changed(reasoning_content="something else"),
        changed(tool_calls=None),
        called('{"a": [1, 1], "b": "x"}'),  # Python: 1 == True
        called('{"a": [1, true], "b": "x "}'),
        called('{"a": [1, true], "b": "x"'),
        called('{"a": [1, true], "b": "x"}', name="shell"),
        changed(role="user"),
    ],
)
def test_an_echo_that_means_something_else_is_an_edit(echo):
    chat = Chat()
    chat.ask([SYSTEM, user("hi")], REPLY)
    request = [SYSTEM, user("hi"), echo, result("ok")]
    match = chat.tree.match(request, TOOLS)
    assert (match.node, match.rest, match.reason) == (chat.tree.root, request, "edit")


def test_who_said_it_is_part_of_the_meaning():
    chat = Chat()
    chat.ask([SYSTEM, user("hi")], said("yes"))
    assert chat.tree.match([SYSTEM, user("hi"), user("yes"), user("x")], TOOLS).node is chat.tree.root


def test_an_edited_echo_is_a_branch_from_the_last_turn_that_stands():
    chat = Chat()
    a = chat.ask([SYSTEM, user("hi")], said("one"))
    b = chat.ask(history(a, user("more")), said("two"))
    c = chat.ask([*history(b)[:-1], said("TWO"), user("go on")])
    assert (c.parent, c.reason) == (a, "edit")
    assert chat.segments() == [
        [1, 2, -1000, -1001, 3, -1002, -1003],
        [1, 2, 1000, 1001, 3, 4, 5, -1004, -1005],  # the first turn is trained in the first sample; `TWO` is context
    ]


@pytest.mark.parametrize("empty", [None, "", [], "absent"])
def test_empty_content_has_many_spellings(empty):
    chat = Chat()
    a = chat.ask([user("hi")], said("", calls=[("sh", "")]))
    echo = said("", calls=[("sh", "{}")]) | {"content": empty}
    if empty == "absent":
        del echo["content"]
    assert chat.tree.match([user("hi"), echo, result("x")], TOOLS).node is a


@pytest.mark.parametrize("nonsense", ["{", "[" * 100_000, '{"a": NaN}', "1" * 5000, '"\\ud800"', "null"])
def test_arguments_that_a_model_takes_for_json_are_compared_too(nonsense):
    chat = Chat()
    a = chat.ask([user("hi")], said(calls=[("sh", nonsense)]))
    assert chat.tree.match(history(a, result("x")), TOOLS).node is a
    assert chat.tree.match([user("hi"), said(calls=[("sh", "0")]), result("x")], TOOLS).node is chat.tree.root


def test_white_space_in_what_the_model_was_shown_matters():
    chat = Chat()
    wide = chat.ask([user("#  @")], said("left"))
    narrow = chat.ask([user("# @")], said("left"))
    assert chat.tree.match(history(wide, user("x")), TOOLS).node is wide
    assert chat.tree.match(history(narrow, user("x")), TOOLS).node is narrow
    assert chat.tree.match([user("#   @"), said("left"), user("x")], TOOLS).node is chat.tree.root
    blocks = [{"type": "text", "text": "# @\n", "cache_control": {}}]
    assert chat.tree.match([user(blocks), said("left"), user("x")], TOOLS).node is narrow


def test_cache_marks_move_between_turns():
    image, mark = {"type": "image_url", "image_url": {"url": "data:x"}}, {"cache_control": {"type": "ephemeral"}}
    chat = Chat()
    a = chat.ask([user([image | mark])], tools=[TOOLS[0] | mark])
    assert chat.tree.match([user([image]), *history(a, user("x"))[1:]], TOOLS).node is a


def test_developer_is_another_word_for_system():
    chat = Chat()
    a = chat.ask([SYSTEM, user("hi")])
    assert chat.tree.match([SYSTEM | {"role": "developer"}, *history(a, user("x"))[1:]], TOOLS).node is a


# Branches ------------------------------------------------------------------------------------------------------------


def test_the_same_request_twice_is_two_samples():
    chat = Chat()
    a, b = chat.ask([SYSTEM, user("hi")]), chat.ask([SYSTEM, user("hi")])
    assert (a.reason, b.reason, a.parent, b.parent) == ("root", "again", chat.tree.root, chat.tree.root)
    assert chat.segments() == [[1, 2, -1000, -1001], [1, 2, -1002, -1003]]


def test_n_answers_are_siblings_and_the_client_goes_on_from_one():
    chat = Chat()
    first = chat.ask([SYSTEM, user("hi")], said("ok"))
    request = history(first, user("more"))
    match, prompt = chat.tree.match(request, TOOLS), [*chat.tree.ids(first).tolist(), *chat.render([request[-1]])]
    x, y = (chat.tree.add(match, prompt, chat.engine.sample(prompt), said(word)) for word in "xy")
    assert (x.parent, y.parent) == (first, first)
    z = chat.ask([*request, said("x"), user("end")])
    assert z.parent is x
    assert chat.segments() == [  # by the time of the last call: y before z
        [1, 2, -1000, -1001, 3, -1004, -1005],
        [1, 2, 1000, 1001, 3, -1002, -1003, 4, -1006, -1007],
    ]


def test_two_interleaved_sub_agents_are_two_segments():
    chat = Chat()
    agents = [[SYSTEM, user("task a")], [SYSTEM, user("task b")]]
    nodes = [[], []]
    for turn in range(3):
        for agent, messages in enumerate(agents):
            node = chat.ask(messages, said("go on"))
            nodes[agent].append(node)
            messages += [said("go on"), result(f"{turn}")]
    assert [[n.reason for n in agent] for agent in nodes] == [["root", "", ""], ["root", "", ""]]
    assert [leaf.path for leaf in (nodes[0][-1], nodes[1][-1])] == nodes
    assert len(chat.tree.samples()) == 2


def test_parallel_agents_with_equal_histories_do_not_share_a_reply():
    chat, request = Chat(), [SYSTEM, user("task")]
    chat.ask(request, said("look", "deep thought")), chat.ask(request, said("look"))
    go_on = [*request, said("look"), result("seen")]
    parents = {chat.ask(go_on).parent.index for _ in range(2)}
    assert parents == {0, 1} and len(chat.tree.samples()) == 2


def test_call_ids_and_reasoning_tell_equal_replies_apart():
    chat, request = Chat(), [SYSTEM, user("task")]
    calls = [("sh", "{}")]
    a, b = chat.ask(request, said("", "p", calls, ["a"])), chat.ask(request, said("", "q", calls, ["b"]))
    for _ in range(2):  # also once something followed
        assert chat.ask([*request, said("", None, calls, ["a"]), result("r", "a")]).parent is a
        assert chat.ask([*request, said("", None, calls, ["b"]), result("r", "b")]).parent is b
        assert chat.ask([*request, said("", "p", calls, ["z"]), result("r", "z")]).parent is a


def test_going_on_from_an_earlier_turn_is_an_edit_and_trains_the_shared_turns_once():
    chat = Chat()
    a = chat.ask([SYSTEM, user("hi")])
    b, c = chat.ask(history(a, user("left"))), chat.ask(history(a, user("right")))
    assert (b.reason, c.reason) == ("", "edit")
    assert chat.segments() == [[1, 2, -1000, -1001, 3, -1002, -1003], [1, 2, 1000, 1001, 4, -1004, -1005]]


SUMMARY = "Goal: mend the parser.\nDone so far: the lexer is right, two tests fail."


def long_chat():
    chat = Chat()
    node = chat.ask([SYSTEM, user("mend it")], said("look", calls=[("sh", "{}")]))
    for turn in range(3):
        node = chat.ask(history(node, result(f"line {turn}")), said(f"step {turn}", calls=[("sh", "{}")]))
    return chat, node


def quote(text):
    return user(f"This goes on from before. Summary:\n\n  {text.splitlines()[1]}\n\nGo on.")


def test_compaction_by_a_summary_in_the_conversation():
    chat, node = long_chat()
    asked = chat.ask(history(node, result("last"), user("Summarise.")), said(SUMMARY))
    assert asked.reason == ""
    new = chat.ask([SYSTEM, quote(SUMMARY)], said("on"))
    assert (new.reason, new.parent) == ("compaction", chat.tree.root)
    assert chat.ask(history(new, user("x"))).reason == ""
    assert len(chat.tree.samples()) == 2


def test_compaction_by_a_side_conversation():
    chat, _ = long_chat()
    summary = chat.ask([{"role": "system", "content": "You sum up."}, user("...")], said(SUMMARY), tools=None)
    assert summary.reason == "side"
    assert chat.ask([SYSTEM, quote(SUMMARY)]).reason == "compaction"
    assert len(chat.tree.samples()) == 2


def test_compaction_that_keeps_the_tail_or_drops_the_middle():
    chat, node = long_chat()
    messages = history(node)  # system, user, (reply, result) * 3, reply
    tail = chat.ask([SYSTEM, user("(history was cut)"), *messages[-3:], result("new")])
    assert (tail.reason, tail.parent) == ("compaction", chat.tree.root)
    middle = chat.ask([*messages[:3], result("line 0"), *messages[-1:], result("new")])
    assert (middle.reason, middle.parent) == ("compaction", chat.tree.nodes[0])
    # One round less is a compaction, one message less is a reply that the client dropped.
    assert chat.ask([SYSTEM, user("(cut)"), *messages[4:], result("new")]).reason == "compaction"
    assert chat.ask([SYSTEM, user("(cut)"), *messages[3:], result("new")]).reason == "edit"


def test_what_is_quoted_from_a_history_that_stands_is_no_compaction():
    chat = Chat()
    a = chat.ask([SYSTEM, user("hi")], said(SUMMARY))
    b = chat.ask(history(a, user("more")))
    chat.ask(history(b, user("more")))
    assert chat.ask(history(a, quote(SUMMARY))).reason == "edit"


def test_a_short_line_or_a_history_no_longer_than_the_request_is_no_quotation():
    chat, _ = long_chat()
    assert chat.ask([SYSTEM, user("look: step 0")]).reason == "root"
    chat = Chat()
    chat.ask([SYSTEM, user("mend it")], said(SUMMARY))
    assert chat.ask([SYSTEM, quote(SUMMARY)]).reason == "root"


def test_a_request_cut_inside_what_was_asked_is_an_edit():
    chat = Chat()
    chat.ask([SYSTEM, user("1+1"), said("2"), user("2+2")])
    assert chat.ask([SYSTEM, user("1+1")]).reason == "edit"


def test_edits_that_keep_what_follows():
    chat, node = long_chat()
    _, first, *rest = history(node)
    hashed = {"role": "system", "content": "You are an agent. hash=1"}
    assert chat.tree.match([hashed, first, *rest, result("x")], TOOLS).reason == "edit"
    assert chat.tree.match([SYSTEM, user("other"), *rest, result("x")], TOOLS).reason == "edit"
    grown = chat.tree.match([SYSTEM, first, *rest, result("x")], TOOLS * 2)
    assert (grown.node, grown.reason) == (chat.tree.root, "edit")  # the model must be shown the new tools


def test_an_empty_reply_that_is_dropped_with_a_reminder_in_the_first_message_is_an_edit():
    chat = Chat()
    chat.ask([SYSTEM, user("mend it")], said(""))
    assert chat.ask([SYSTEM, user("mend it\n<reminder>say something</reminder>")]).reason == "edit"
    chat = Chat()
    chat.ask([SYSTEM, user("")])
    assert chat.ask([SYSTEM, user("mend it")]).reason == "root"


def test_a_sub_agent_of_another_prompt_and_other_tools_is_a_root():
    chat, _ = long_chat()
    assert chat.ask([{"role": "system", "content": "You search."}, user("mend it")], tools=TOOLS * 2).reason == "root"


# Templates -----------------------------------------------------------------------------------------------------------


def test_a_prompt_that_rewrites_history_is_a_template_branch():
    chat = Chat()
    a = chat.ask([SYSTEM, user("hi")], said("yes", "hm"))
    b = chat.ask(history(a, user("and?")), said("no", "hm"), whole=True)
    c = chat.ask(history(b, user("end")), whole=True)
    assert [(n.reason, n.parent) for n in (b, c)] == [("template", chat.tree.root)] * 2
    assert chat.tree.messages(c)[:5] == history(b)
    assert chat.segments() == [[1, 2, -1000, -1001], [1, 2, 3, 4, -1002, -1003], [1, 2, 3, 4, 5, 6, -1004, -1005]]


def test_a_template_branch_goes_off_at_the_deepest_ids_that_stand():
    """As in a tool cycle: the reasoning of the last turn is dropped, that of the first stays."""
    chat = Chat()
    a = chat.ask([SYSTEM, user("hi")], said("yes"))
    b = chat.ask(history(a, user("and?")), said("no"))
    match = chat.tree.match(history(b, user("end")), TOOLS)
    assert match.node is b
    prompt = [1, 2, 1000, 1001, 3, 50, 4]  # 50: the second reply, rendered anew
    c = chat.tree.add(match, prompt, chat.engine.sample(prompt), said("z"))
    assert (c.parent, c.reason) == (a, "template")
    assert c.messages == [user("and?"), said("no"), user("end"), said("z")]
    assert chat.segments()[1] == [1, 2, 1000, 1001, 3, 50, 4, -1004, -1005]
    assert chat.tree.match(history(c, user("x")), TOOLS).node is c


def test_a_prompt_shorter_than_the_path_is_a_template_branch():
    chat = Chat()
    a = chat.ask([SYSTEM, user("hi")], said("yes"))
    match = chat.tree.match(history(a, user("x")), TOOLS)
    node = chat.tree.add(match, [1, 2, 1000], chat.engine.sample([1, 2, 1000]), said("z"))
    assert (node.parent, node.reason, node.context_ids.tolist()) == (chat.tree.root, "template", [1, 2, 1000])


# What is trained -----------------------------------------------------------------------------------------------------

TITLE = [{"role": "system", "content": "Write a title."}, user("hi")]


@pytest.mark.parametrize("first", [True, False])
def test_side_conversations_are_recorded_but_trained_only_if_asked(first):
    chat = Chat()
    calls = [lambda: chat.ask(TITLE, tools=None), lambda: chat.ask([SYSTEM, user("hi")])]
    title, main = [call() for call in (calls if first else calls[::-1])][:: 1 if first else -1]
    assert chat.tree.side(title) and not chat.tree.side(main)
    assert title.reason == ("root" if first else "side")
    assert [s.token_ids.tolist() for s in chat.tree.samples()] == [chat.tree.ids(main).tolist()]
    more = chat.ask(history(title, user("shorter")), tools=None)
    assert chat.tree.side(more) and more.reason == "" and len(chat.tree.samples()) == 1
    chat.tree.train_side = True
    assert len(chat.tree.samples()) == 2


def test_no_tools_alone_or_another_prompt_alone_is_not_side():
    chat = Chat()
    chat.ask([SYSTEM, user("hi")])
    for request, tools in (([SYSTEM, user("sum up")], None), (TITLE, TOOLS)):
        assert not chat.tree.side(chat.ask(request, tools=tools))
    assert len(chat.tree.samples()) == 3


def test_without_any_tools_the_first_conversation_is_the_main_one():
    chat = Chat()
    a, b = chat.ask([SYSTEM, user("hi")], tools=None), chat.ask(TITLE, tools=[])
    assert (chat.tree.side(a), chat.tree.side(b)) == (False, True)


@pytest.mark.parametrize("how", ["opted out", "excluded"])
def test_a_simulated_user_who_speaks_first_is_not_the_main_conversation(how):
    chat = Chat()
    simulated = chat.ask(TITLE, tools=None, train=how != "opted out")
    if how == "excluded":
        chat.tree.exclude(simulated)
    agent = chat.ask([SYSTEM, user("hi")], tools=None)
    assert agent.reason == "root" and not chat.tree.side(agent)
    assert [s.token_ids.tolist() for s in chat.tree.samples()] == [chat.tree.ids(agent).tolist()]


def test_a_conversation_whose_first_call_opted_out_is_the_main_one_all_the_same():
    chat = Chat()
    main = chat.ask([SYSTEM, user("hi")], tools=None, train=False)
    titles = [chat.ask(TITLE, tools=None)]  # the only one that is trained so far
    assert not chat.tree.side(titles[0])
    main = chat.ask(history(main, user("more")), tools=None)
    titles.append(chat.ask(TITLE, tools=None))
    assert not chat.tree.side(main) and all(map(chat.tree.side, titles))


def test_exclude_a_node_or_by_a_predicate():
    chat = Chat()
    a = chat.ask([SYSTEM, user("hi")])
    b, c = chat.ask(history(a, user("left"))), chat.ask(history(a, user("right")))
    chat.tree.exclude(b)
    chat.ask(history(b, user("on")))  # what follows is excluded too
    assert chat.segments() == [[1, 2, -1000, -1001, 4, -1004, -1005]]
    chat.tree.exclude(lambda node: node.reason == "edit")
    assert chat.segments() == [[1, 2, -1000, -1001]] and c.reason == "edit"
    chat.tree.exclude(a)
    assert chat.segments() == []


def test_a_call_that_is_not_trained_is_context_for_what_follows():
    chat = Chat()
    a = chat.ask([SYSTEM, user("hi")], train=False)
    b = chat.ask(history(a, user("on")))
    chat.ask(history(b, user("judge")), train=False)  # no sample may end in it
    assert chat.segments() == [[1, 2, 1000, 1001, 3, -1002, -1003]]


def test_a_call_that_sampled_nothing_makes_no_sample():
    tree, engine = Tree(), Engine()
    tree.add(tree.match([user("hi")]), [1], engine.sample([1], 0), said(""))
    assert tree.samples() == [] and "versions none, not trained" in tree.show(str)


def test_show():
    chat = Chat()
    a = chat.ask([SYSTEM, user("hi")], said("one"))
    chat.engine.version = 8
    b = chat.ask(history(a, user("x")), said("two"))
    chat.ask(TITLE, tools=None)
    chat.ask(history(a, user("y")))
    chat.ask(history(b, user("z")))
    assert chat.tree.show(lambda ids: " ".join(map(str, ids))).splitlines() == [
        "#0 at the root (root): versions 7, trained in sample 0",
        "  -      2 '1 2'",
        "  +      2 '1000 1001'",
        "  #1 after #0: versions 8, trained in sample 1",
        "    -      1 '3'",
        "    +      2 '1002 1003'",
        "  #4 after #1: versions 8, trained in sample 1",
        "    -      1 '6'",
        "    +      2 '1008 1009'",
        "  #3 after #0 (edit): versions 8, trained in sample 0",
        "    -      1 '5'",
        "    +      2 '1006 1007'",
        "#2 at the root (side): versions 8, not trained",
        "  -      2 '4 2'",
        "  +      2 '1004 1005'",
    ]


# Any sequence --------------------------------------------------------------------------------------------------------

WORDS = ["yes", "no", ""]  # few, so that replies often mean the same


class Sessions:
    """Clients that go on, branch, edit, compact, retry, fail and spell their echoes anew, on one tree.

    What must hold is told from the engine's log and from the messages as they are made here: a *plain* message
    (role, word, reasoning, argument) is its meaning by construction, `spelled` gives one of its spellings.
    """

    def __init__(self):
        self.tree, self.engine = Tree(), Engine()
        self.clients = []  # (plain messages, tools)
        self.calls = []  # (node, turn, plain messages with the reply, tools, trained)
        self.excluded = set()

    def spelled(self, plain, spelling):
        role, word, reasoning, argument = plain
        if role != "assistant":
            return {"role": role, "content": [{"type": "text", "text": word}] if spelling % 2 else word}
        message = said([f" {word}\n", [{"type": "text", "text": word}], word, word or None][spelling % 4], reasoning)
        if argument is not None:
            text = [f'{{"n":{argument},"t":1}}', f'{{"t": 1.0, "n": {argument}}}'][spelling % 2]
            message |= said(message["content"], reasoning, [("sh", text)], [f"id{spelling}"])
        return message

    def start(self, a, b, c):
        word = ("user", WORDS[c % 3], None, None)
        self.clients.append([[("system", "AAB"[a % 3], None, None), word], [TOOLS, None][b % 2]])

    def ask(self, a, b, c):
        """One request with n of 1 or 2. The client goes on from the last answer."""
        client = self.clients[a % len(self.clients)]
        plain, tools = client
        messages = [self.spelled(p, b + i) for i, p in enumerate(plain)]
        match = self.tree.match(messages, tools)
        self.check_match(match, messages, plain, tools)
        prompt = self.prompt(match, messages, ["bridge", "whole", "bridge", "half", "bridge"][c % 5])
        for i in range(1 + (c % 7 == 0)):
            turn = self.engine.sample(prompt, (b + i) % 4)
            answer = ("assistant", WORDS[(c + i) % 3], [None, "p", "q"][b % 3], [None, 1][c % 2])
            node = self.tree.add(match, prompt, turn, self.spelled(answer, 2 + i), train=bool(b % 6))
            self.calls.append((node, turn, [*plain, answer], tools, bool(b % 6)))
        if c % 4 == 0:  # many clients drop the reasoning
            answer = (*answer[:2], None, answer[3])
        client[0] = [*plain, answer, ("tool" if answer[3] else "user", WORDS[b % 3], None, None)]

    def prompt(self, match, messages, render):
        """What a session gives the engine: mostly exact ids and what is new, sometimes history rendered anew."""
        path = match.node.path
        kept = {"bridge": len(path), "whole": 0, "half": len(path) // 2}[render]
        node = path[kept - 1] if kept else self.tree.root
        return [*self.tree.ids(node).tolist(), *(1 + len(str(m)) % 900 for m in messages[node.end :])]

    def fail(self, a, b, _):
        """The engine failed after the match: nothing may remain of it."""
        plain, tools = self.clients[a % len(self.clients)]
        before = self.tree.show(str)
        self.tree.match([self.spelled(p, b) for p in plain], tools)
        assert self.tree.show(str) == before

    def fork(self, a, *_):
        self.clients.append(list(self.clients[a % len(self.clients)]))

    def edit(self, a, b, c):
        client = self.clients[a % len(self.clients)]
        at = b % len(client[0])
        role, _, *rest = client[0][at]
        client[0] = [*client[0][:at], (role, ["yes", "edited"][c % 2], *rest), *client[0][at + 1 :]]

    def compact(self, a, b, _):
        client = self.clients[a % len(self.clients)]
        client[0] = [client[0][0], ("user", "summary", None, None), *client[0][2:][-(b % 4) :]]

    def go_back(self, a, b, _):
        client = self.clients[a % len(self.clients)]
        client[0] = client[0][: 2 + b]

    def exclude(self, a, *_):
        if self.calls:
            node = self.calls[-1 - a % len(self.calls)][0]
            self.excluded.add(node)
            self.tree.exclude(node)

    @staticmethod
    def repeats(plain, path):
        return len(path) <= len(plain) and all(
            (a[0], a[1], a[3]) == (b[0], b[1], b[3]) and a[2] in (None, b[2]) for a, b in zip(plain, path, strict=False)
        )

    def check_match(self, match, messages, plain, tools):
        """The deepest path that is repeated, and all messages after it."""
        paths = {node: full for node, _, full, offered, _ in self.calls if offered == tools}
        depths = [len(full) for full in paths.values() if self.repeats(plain, full)]
        assert match.node.end == max(depths, default=0)
        assert match.rest == messages[match.node.end :]
        assert match.node is self.tree.root or self.repeats(plain, paths[match.node])

    def included(self):
        """By what is known here: opt-outs, exclusions, and which conversation is the main one."""
        tops = {node: (full[0][1], tools) for node, _, full, tools, _ in self.calls if len(node.path) == 1}
        trained = {node.path[0] for node, *_, train in self.calls if train}
        mains = [top for node, top in tops.items() if node in trained - self.excluded]
        main = next((top for top in mains if top[1]), mains[0] if mains else None)
        for node, turn, _, tools, train in self.calls:
            side = main is not None and tools is None and tops[node.path[0]][0] != main[0]
            if train and not side and not self.excluded & set(node.path) and len(turn.token_ids):
                yield turn

    def check(self):
        every = [[*turn.prompt_ids.tolist(), *turn.token_ids.tolist()] for _, turn, *_ in self.calls]
        assert [self.tree.ids(node).tolist() for node, *_ in self.calls] == every
        included, samples = list(self.included()), self.tree.samples()
        # Every sampled token of an included branch is trained once, and no other token.
        trained = sorted(token for s in samples for token in s.token_ids[s.mask].tolist())
        assert trained == sorted(token for turn in included for token in turn.token_ids.tolist())
        # It carries its own log-prob and version; all others carry none.
        log = {}
        for turn in self.engine.turns:
            ids, logprobs, versions = (x.tolist() for x in (turn.token_ids, turn.logprobs, turn.versions))
            log |= dict(zip(ids, zip(logprobs, versions, strict=True), strict=True))
        for s in samples:
            for token, *carried in zip(*(x.tolist() for x in (s.token_ids, s.logprobs, s.versions)), strict=True):
                assert tuple(carried) in ((0.0, -1), log.get(token))
            # So it does in any column.
            assert s.columns.values(TWICE).tolist() == np.where(s.mask, 2 * s.token_ids, -1).tolist()
        # Every sample is one prompt of the engine and what it sampled from it; no sample is part of another.
        seen = [[*turn.prompt_ids.tolist(), *turn.token_ids.tolist()] for turn in included]
        leaves = [ids for ids in seen if not any(len(o) > len(ids) and o[: len(ids)] == ids for o in seen)]
        assert [s.token_ids.tolist() for s in samples] == leaves


STEPS = ["start"] * 2 + ["ask"] * 12 + ["fork"] * 2 + ["edit", "edit", "compact", "go_back", "fail", "exclude"]


@given(st.lists(st.tuples(st.sampled_from(STEPS), *[st.integers(0, 41)] * 3), min_size=5, max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_sequence_of_requests_edits_branches_and_failures(steps):
    sessions = Sessions()
    sessions.start(0, 0, 0)
    for name, *choices in steps:
        getattr(sessions, name)(*choices)
        sessions.engine.version += name == "start"
    sessions.check()


ONE_ANSWER = [c for c in range(42) if c % 5 in (0, 2, 4) and c % 7]  # from exact ids
TRAINED = [b for b in range(42) if b % 4 and b % 6]  # of one token at least


@given(st.lists(st.tuples(st.sampled_from(TRAINED), st.sampled_from(ONE_ANSWER)), min_size=2, max_size=6))
@settings(max_examples=50, deadline=None)
def test_however_a_client_spells_its_echoes_the_conversation_stays_one_segment(turns):
    sessions = Sessions()
    sessions.start(0, 0, 0)
    for b, c in turns:
        sessions.ask(0, b, c)
    assert [n.reason for n in sessions.tree.nodes] == ["root"] + [""] * (len(turns) - 1)
    assert len(sessions.tree.samples()) == 1
    sessions.check()
