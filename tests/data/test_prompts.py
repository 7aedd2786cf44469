"""A stream of prompts is a pure function of (seed, index); a row that cannot be used says why."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.chat.messages import read_tools
from molt.config import PromptDataConfig
from molt.data.mixture import EpochOrder
from molt.data.prompts import PromptDataset, PromptStream
from molt.data.rows import load_rows
from molt.errors import DataError, UnusableRow


@pytest.fixture
def dataset(tmp_path):
    def build(rows, **config):
        path = tmp_path / "tasks.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return PromptDataset(load_rows(str(path), flag="data.prompt_dataset"), PromptDataConfig(**config))

    return build


def stream_of(dataset, *, seed, num_episodes):
    return PromptStream(dataset, EpochOrder([len(dataset)], seed=seed), num_episodes=num_episodes)


class Numbers:
    """As many prompts as asked for; the stream needs no more of a dataset."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def prompt(self, row):
        from molt.types import Prompt

        return Prompt(epoch=0, position=row, row=row, messages=None, text=str(row))


def test_plain_text(dataset):
    prompt = dataset([{"input": "1+1=", "label": 2}], label_key="label").prompt(0)
    assert (prompt.text, prompt.messages, prompt.label, prompt.data_source) == ("1+1=", None, 2, "tasks")


def test_chat_rows_and_data_source(dataset):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = [{"q": "hi", "data_source": "greetings"}, {"q": messages}]
    prompts = dataset(rows, input_key="q", apply_chat_template=True)
    assert prompts.prompt(0).messages == [{"role": "user", "content": "hi"}]
    assert prompts.prompt(0).text is None and prompts.prompt(0).label is None
    assert prompts.prompt(0).data_source == "greetings"
    assert prompts.prompt(1).messages == messages
    assert prompts.prompt(1).data_source == "tasks"


GOOD = {"input": "fine", "label": 1}


@pytest.mark.parametrize(
    "chat, bad, reason",
    [
        (False, {"input": [{"role": "user", "content": "x"}], "label": 1}, "not text; messages need `data.apply_chat"),
        (False, {"input": 3, "label": 1}, "`input` is a int, not text"),
        (False, {"input": " \n", "label": 1}, "`input` is empty"),
        (False, {"label": 1}, "without `input`"),
        (False, {"input": "x"}, "without `label`"),
        (True, {"input": "", "label": 1}, "`input` is empty"),
        (True, {"input": [], "label": 1}, "no messages"),
        (True, {"input": {"role": "user"}, "label": 1}, "not a list of messages"),
        (True, {"input": [{"content": "x"}], "label": 1}, "without a role"),
        (True, {"input": ["x"], "label": 1}, "without a role"),
        (True, {"input": [{"role": "user", "content": None}], "label": 1}, "without text or tool calls"),
        (False, {"input": "smile \ud83d here", "label": 1}, "`input` has half of a surrogate pair ('\\ud83d')"),
        (False, {"input": "x", "label": ["\udc4d"]}, "`label` has half of a surrogate pair"),
        (False, {"input": "x", "label": 1, "data_source": "\udc4d"}, "`data_source` has half of a surrogate pair"),
        (True, {"input": [{"role": "user", "content": "\ud83d"}], "label": 1}, "`input` has half of a surrogate"),
        (True, {"input": [{"role": "assistant", "content": "4"}], "label": 1}, "ends with the assistant's answer"),
    ],
)
def test_unusable_rows_say_why(dataset, chat, bad, reason):
    prompts = dataset([GOOD, bad], label_key="label", apply_chat_template=chat)
    with pytest.raises(UnusableRow) as error:
        prompts.prompt(1)
    assert reason in str(error.value)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def test_tools_are_a_list_or_json_text_or_none(dataset):
    cells = [[TOOL], json.dumps([TOOL, TOOL]), None, [], "", "[]"]
    prompts = dataset(
        [{"input": "x", "tools": cell} for cell in cells] + [{"input": "x"}],
        apply_chat_template=True,
        tools_key="tools",
    )
    assert [prompts.prompt(row).tools for row in range(7)] == [[TOOL], [TOOL, TOOL], None, None, None, None, None]
    assert dataset([{"input": "x", "tools": [TOOL]}], apply_chat_template=True).prompt(0).tools is None


@pytest.mark.parametrize(
    ("cell", "reason"),
    [("[{", "whose `tools` is not valid JSON"), (TOOL, "not a list of tool schemas"), (["f"], "not a list of tool")],
)
def test_malformed_tools_make_a_row_unusable(dataset, cell, reason):
    prompts = dataset([{"input": "x", "tools": cell}], apply_chat_template=True, tools_key="tools")
    with pytest.raises(UnusableRow) as error:
        prompts.prompt(0)
    assert reason in str(error.value)
    with pytest.raises(UnusableRow, match="whose `t` is not"):
        read_tools("{}x", "t")


def test_a_null_label_is_a_label(dataset):
    assert dataset([{"input": "x", "label": None}], label_key="label").prompt(0).label is None


def test_missing_columns_are_named(dataset):
    with pytest.raises(DataError, match=r"`data.input_key` \(=inptu\).*Did you mean 'input'"):
        dataset([GOOD], input_key="inptu")
    with pytest.raises(DataError, match=r"`data.label_key` \(=labels\).*Did you mean 'label'"):
        dataset([GOOD], label_key="labels")
    with pytest.raises(DataError, match=r"`data.tools_key` \(=tool\).*no row could be used.*Use one of: input, label"):
        dataset([GOOD], tools_key="tool")


@given(n=st.integers(1, 40), episodes=st.integers(1, 4), seed=st.integers(-5, 2**70), data=st.data())
@settings(deadline=None, max_examples=50)
def test_any_split_into_runs_gives_the_same_sequence(n, episodes, seed, data):
    whole = list(stream_of(Numbers(n), seed=seed, num_episodes=episodes))
    cuts = sorted(data.draw(st.lists(st.integers(0, n * episodes), max_size=4)))
    pieces = []
    for start, end in zip([0, *cuts], [*cuts, n * episodes], strict=True):
        stream = stream_of(Numbers(n), seed=seed, num_episodes=episodes)  # a new process
        pieces += [stream[i] for i in range(start, end)]
    assert pieces == whole
    assert len({prompt.group_id for prompt in whole}) == n * episodes


@given(n=st.integers(1, 40), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=50)
def test_each_epoch_is_a_permutation(n, seed):
    stream = stream_of(Numbers(n), seed=seed, num_episodes=3)
    for epoch in range(3):
        prompts = [stream[epoch * n + position] for position in range(n)]
        assert sorted(prompt.row for prompt in prompts) == list(range(n))
        assert [(prompt.epoch, prompt.position) for prompt in prompts] == [(epoch, i) for i in range(n)]


def test_epochs_and_seeds_differ():
    def order(seed, epoch):
        stream = stream_of(Numbers(50), seed=seed, num_episodes=2)
        return [stream[epoch * 50 + i].row for i in range(50)]

    assert order(1, 0) != order(1, 1) and order(1, 0) != order(2, 0)
    assert order(1, 1) != order(2, 0)  # seed and epoch are not simply added


def test_order_is_pinned():
    """A checkpoint holds only an index: this order may never change between versions of molt."""
    stream = stream_of(Numbers(8), seed=42, num_episodes=2)
    assert [prompt.row for prompt in stream] == PINNED


PINNED = [3, 4, 2, 7, 6, 1, 5, 0, 0, 4, 6, 1, 2, 7, 3, 5]


def test_ends_and_index():
    stream = stream_of(Numbers(3), seed=0, num_episodes=2)
    assert len(stream) == 6
    for outside in (-1, 6):
        with pytest.raises(IndexError):
            stream[outside]
    assert [stream.index(stream[i].epoch, stream[i].position) for i in range(6)] == list(range(6))


def test_a_mixed_stream_resumes_anywhere():
    order = EpochOrder([6, 30], seed=3, shares="1,2")  # N = 19: 6 and 13 rows an epoch
    whole = list(PromptStream(Numbers(36), order, num_episodes=4))
    assert len(whole) == 4 * 19 and len({prompt.group_id for prompt in whole}) == 4 * 19
    assert [sum(prompt.row < 6 for prompt in whole[e * 19 : (e + 1) * 19]) for e in range(4)] == [6] * 4
    for start in (0, 18, 19, 50):  # a new process
        stream = PromptStream(Numbers(36), EpochOrder([6, 30], seed=3, shares="1,2"), num_episodes=4)
        assert [stream[i] for i in range(start, len(stream))] == whole[start:]
        assert stream.index(whole[start].epoch, whole[start].position) == start


def test_the_stream_names_the_row_that_cannot_be_used(dataset):
    stream = stream_of(dataset([GOOD, {"input": ""}, GOOD]), seed=0, num_episodes=1)
    bad = [i for i in range(3) if stream.row(i) == 1]
    with pytest.raises(UnusableRow):
        stream[bad[0]]
