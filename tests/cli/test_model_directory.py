"""`molt check` looks at a model directory without its weights: does what is in it fit together?"""

import json

import pytest
from tokenizers import processors

from molt.chat.render import Renderer, end_ids, stop_ids, turn_end
from molt.cli.main import main
from molt.types import Prompt
from tests.cli.conftest import as_given
from tests.cli.test_check import RL, SFT
from tests.tiny import CHATML, END_ID, PAD_ID, QWEN3, bpe_tokenizer, char_tokenizer, save_tiny

BASE_END = "<|pad|>"
"""What a base model of these tests ends a text with."""


def base_tokenizer(template=CHATML):
    """Of a base model: it has the tokens of ChatML, but ends with another one."""
    tokenizer = char_tokenizer(template)
    tokenizer.eos_token = BASE_END
    return tokenizer


def directory(path, tokenizer=None, **generation):
    """A model directory, its generation config changed."""
    save_tiny(path, tokenizer=tokenizer)
    file = path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | generation))
    return path


def checked(capsys, kind, extra=""):
    code = main(["check", kind, *(RL if kind == "rl" else SFT).split(), *extra.split()])
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    return code, output.out


def model_flag(kind):
    return "--actor.model_name_or_path" if kind == "rl" else "--model.model_name_or_path"


# The end of a turn ----------------------------------------------------------------------------------------------------

UNCLOSED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
PLAIN = UNCLOSED.replace("<|im_start|>", "\n### ")
SPACED = CHATML.replace("<|im_end|>", " <|im_end|>")
TAGGED = CHATML.replace("<|im_end|>", "</answer><|im_end|>")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (CHATML, "<|im_end|>"),
        (QWEN3, "<|im_end|>"),
        (SPACED, "<|im_end|>"),
        (TAGGED, "<|im_end|>"),
        (UNCLOSED, "<|im_start|>"),
        (PLAIN, None),
    ],
)
def test_what_ends_a_turn(template, text):
    tokenizer = base_tokenizer(template)
    end = turn_end(tokenizer)
    expected = None if text is None else tokenizer.convert_tokens_to_ids(text)
    assert end.token_id == expected
    assert stop_ids(tokenizer, [7], apply_chat_template=True) == sorted({PAD_ID, 7, expected} - {None})
    assert stop_ids(tokenizer, [7], apply_chat_template=False) == [PAD_ID, 7]


def test_a_policy_stops_where_its_template_ends_a_turn():
    renderer = Renderer(base_tokenizer(), apply_chat_template=True)
    assert renderer.eos_ids == [PAD_ID, END_ID]
    after = renderer.continuation_ids([END_ID], "next")  # the model closed its turn itself
    assert END_ID not in after[:1]


@pytest.mark.parametrize(("ends", "expected"), [(5, [5]), ([5, 6], [5, 6]), (None, [])])
def test_without_a_generation_config_the_configuration_names_the_ends(ends, expected, tmp_path):
    save_tiny(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"eos_token_id": ends}))
    assert end_ids(str(tmp_path)) == expected
    settings.pop("eos_token_id")
    (tmp_path / "config.json").write_text(json.dumps(settings | {"model_type": "llama"}))
    assert end_ids(str(tmp_path)) == []  # not the 2 that is the default of Llama's configuration
    (tmp_path / "config.json").unlink()
    assert end_ids(str(tmp_path)) == []


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_base_model_with_a_foreign_template_is_told_where_it_stops(kind, run, capsys):
    directory(run / "base", base_tokenizer())
    code, shown = checked(capsys, kind, f"{model_flag(kind)} base")
    assert code == 0
    assert f"ok       end of an answer: '<|im_end|>' (id {END_ID})" in shown
    assert f"end tokens of base, which are [{PAD_ID}]; the exported model stops there too" in as_given(shown)


@pytest.mark.parametrize(("kind", "level"), [("rl", "warning"), ("sft", "error")])
def test_a_template_that_nothing_could_stop_is_refused_by_sft(kind, level, run, capsys):
    tokenizer = bpe_tokenizer(CHATML.replace("<|im_end|>", "<|eot|>"))
    directory(run / "base", tokenizer)
    code, shown = checked(capsys, kind, f"{model_flag(kind)} base")
    assert code == (level == "error")
    assert f"{level:<9}`" in shown
    for part in (
        "ends an answer with '<|eot|>'",
        "no special token of this tokenizer",
        "nothing would stop",
        "'<|im_end|>'",
    ):
        assert part in shown


# Embeddings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_tokens_without_embedding(kind, run, capsys):
    """The last character of the alphabet, a tilde, has no embedding: that is a doubt, and the row is dropped."""
    tokenizer = char_tokenizer()
    save_tiny(run / "short", tokenizer=tokenizer, vocab_size=len(tokenizer) - 1)
    with (run / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"input": "~", "label": "1"}) + "\n")
    code, shown = checked(capsys, kind, f"{model_flag(kind)} short")
    assert code == 0
    assert f"tokens up to id {len(tokenizer) - 1} ('~') and the model has {len(tokenizer) - 1} embeddings" in shown
    assert "dropped 1 of 21 rows" in shown and "(row 20)" in shown


def test_a_template_of_tokens_without_embedding_is_an_error(run, capsys):
    tokenizer = char_tokenizer(CHATML.replace("<|im_start|>", "<|new|>"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    save_tiny(run / "grown", tokenizer=tokenizer, vocab_size=len(tokenizer) - 1)
    for kind in ("rl", "sft"):
        code, shown = checked(capsys, kind, f"{model_flag(kind)} grown")
        assert code == 1 and "above the last of the model's" in shown


# What begins and ends a text ------------------------------------------------------------------------------------------


def with_beginning(tokenizer, single):
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<|pad|>", PAD_ID), ("<|im_end|>", END_ID)]
    )
    return tokenizer


def test_a_template_without_the_beginning_of_a_text_is_a_doubt(run, capsys):
    directory(run / "begins", with_beginning(char_tokenizer(), "<|pad|> $A"))
    code, shown = checked(capsys, "sft", "--model.model_name_or_path begins")
    assert code == 0 and "begins plain text with '<|pad|>', and the chat template does not" in shown
    directory(run / "both", with_beginning(char_tokenizer("{{- '<|pad|>' }}" + CHATML), "<|pad|> $A"))
    code, shown = checked(capsys, "sft", "--model.model_name_or_path both")
    assert code == 0 and "begins plain text" not in shown


def test_plain_prompts_begin_once_and_do_not_end():
    """Not twice where the text spells the beginning itself, as one that was rendered before does."""
    tokenizer = with_beginning(char_tokenizer(), "<|pad|> $A <|im_end|>")
    renderer = Renderer(tokenizer, apply_chat_template=False)

    def ids(text):
        return renderer.prompt_ids(Prompt(0, 0, 0, messages=None, text=text))

    a = tokenizer("a", add_special_tokens=False).input_ids
    assert tokenizer("a").input_ids == [PAD_ID, *a, END_ID]
    assert ids("a") == ids("<|pad|>a") == [PAD_ID, *a]
    assert Renderer(char_tokenizer(), apply_chat_template=False).prompt_ids(
        Prompt(0, 0, 0, messages=None, text="<|pad|>a<|im_end|>")
    ) == [PAD_ID, *a, END_ID]


# Generation config ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_generation_config_that_cannot_be_saved_is_a_doubt(kind, run, capsys):
    directory(run / "cold", do_sample=False, temperature=0.6)
    code, shown = checked(capsys, kind, f"{model_flag(kind)} cold")
    assert code == 0
    assert "refuses to save its generation config" in shown and "will have another: do_sample True" in shown


def test_a_generation_config_that_cannot_be_loaded_is_an_error(run, capsys):
    directory(run / "odd", num_return_sequences=4)
    code, shown = checked(capsys, "sft", "--model.model_name_or_path odd")
    assert code == 1 and "generation_config.json is refused by transformers" in shown


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_what_could_not_be_written_after_the_last_step_is_an_error(kind, run, capsys, monkeypatch):
    def save(*_, **__):
        raise ValueError("this tokenizer cannot be saved")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", save)
    code, shown = checked(capsys, kind)
    assert code == 1
    assert "could not be saved (ValueError: this tokenizer cannot be saved), so the run would end without" in shown


# Columns that nobody reads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_column_that_changes_the_meaning_and_is_not_read_is_named(kind, run, capsys):
    row = {"input": "x", "label": "1"}
    rows = [row | {"tools": None}, row | {"tools": [{"name": "f"}], "images": [], "note": "mine"}]
    (run / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    code, shown = checked(capsys, kind)
    assert code == 0
    assert "the column `tools` (in 1 row, first row 1) is not read" in shown and "--data.tools_key tools" in shown
    assert "`images`" not in shown and "`note`" not in shown
    code, shown = checked(capsys, kind, "--data.tools_key tools")
    assert "is not read" not in shown


def test_what_the_template_does_not_show_of_a_prompt_is_named(run, capsys):
    rows = [
        {"input": "x", "label": "1", "tools": []},
        {"input": [{"role": "user", "content": "x", "mood": "glad"}], "label": "1", "tools": [{"name": "f"}]},
    ]
    (run / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    template = run / "deaf.jinja"
    template.write_text(CHATML[CHATML.index("{%- for m in") :])
    code, shown = checked(capsys, "rl", f"--data.tools_key tools --data.chat_template {template}")
    assert code == 0
    assert "does not show the tools in 1 row (row 1), the key `mood` of messages in 1 row (row 1)" in shown


# Half a pair, marks of editors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_half_a_surrogate_pair_is_one_dropped_row(kind, run, capsys):
    with (run / "prompts.jsonl").open("a") as file:
        file.write('{"input": "smile \\ud83d here", "label": "x"}\n{"input": "x", "label": "\\udc4d"}\n')
    code, shown = checked(capsys, kind)
    assert code == 0 and "dropped 2 of 22 rows" in shown
    assert "whose `input` has half of a surrogate pair" in shown and "whose `label` has half" in shown
