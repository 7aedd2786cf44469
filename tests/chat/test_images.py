"""Images from the wire to the tokens that stand for them, without an engine."""

import asyncio
import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AddedToken

from molt.chat.chat_renderer import ChatRenderer
from molt.chat.images import MAX_IMAGES, MAX_PIXELS, ImageReader, load_image_reader, open_image, read_images
from molt.chat.protocol import ChatError, ChatRequest
from molt.chat.session import Session
from molt.errors import ConfigError
from molt.types import Media
from tests.chat.scripted import VERSION, ScriptedModel, turn_of
from tests.tiny import END_ID, char_tokenizer, save_tiny
from tests.tiny_vlm import data_url, picture, png, save_tiny_vlm, vlm_processor, vlm_tokenizer

TEMPLATES = Path(__file__).parent.parent / "data" / "templates"
TOKENIZER = vlm_tokenizer()
FAKE, GLOBAL, IMAGE = TOKENIZER.convert_tokens_to_ids(["<fake_token_around_image>", "<global-img>", "<image>"])
BLOCK = [FAKE, GLOBAL, IMAGE, IMAGE, IMAGE, IMAGE, FAKE]


def vlm_renderer(**settings) -> ChatRenderer:
    return ChatRenderer(TOKENIZER, images=ImageReader(vlm_processor(TOKENIZER)), **settings)


def text_ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False).input_ids


def user(*parts) -> dict:
    """A message of texts and images."""
    made = [
        {"type": "text", "text": part} if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]  # fmt: skip
    return {"role": "user", "content": made}


class Seeing(ScriptedModel):
    """A scripted engine that notes what it is shown."""

    def __init__(self, *script):
        super().__init__(*script)
        self.given = []

    async def __call__(self, prompt_ids, max_tokens, media=()):
        self.given.append((prompt_ids, media))
        return turn_of(self.script.pop(0), prompt_ids, max_tokens)


def session_of(*script, renderer=None, **settings) -> Session:
    return Session(renderer or vlm_renderer(), Seeing(*script), **{"max_len": 1000, **settings})


def ask(session: Session, *messages, **settings):
    return asyncio.run(session.answer(ChatRequest(list(messages), **settings)))


def refused(session: Session, *messages) -> ChatError:
    with pytest.raises(ChatError) as error:
        ask(session, *messages)
    assert error.value.status == 400 and session.failure is None and session.tree.nodes == []
    return error.value


def test_two_turns_with_images_are_one_segment_with_the_spans_of_both():
    red, blue, late = picture(1), picture(2, 30, 50), picture(3)
    session = session_of("one", "two")
    first = user("a", red, "b", blue)
    reply = ask(session, first)
    head = [*text_ids("<|im_start|>user\na"), *BLOCK, *text_ids("b"), *BLOCK, *text_ids("<|im_end|>\n")]
    prompt = [*head, *text_ids("<|im_start|>assistant\n")]
    at = len(text_ids("<|im_start|>user\na"))
    media = (Media(at, 7, IMAGE, png(red)), Media(at + 7 + 1, 7, IMAGE, png(blue)))
    assert session.call_model.given == [(prompt, media)] and reply.prompt_tokens == len(prompt)

    second = user(late)
    assert asyncio.run(session.count(ChatRequest([first, {"role": "assistant", "content": "one"}, second]))) == (
        ask(session, first, {"role": "assistant", "content": "one"}, second).prompt_tokens
    )
    said = [*prompt, *text_ids("one"), END_ID]
    start = len(said) + len(text_ids("\n<|im_start|>user\n"))
    ids, shown = session.call_model.given[1]
    added = [*text_ids("\n<|im_start|>user\n"), *BLOCK, *text_ids("<|im_end|>\n<|im_start|>assistant\n")]
    assert ids == [*said, *added] and shown == (*media, Media(start, 7, IMAGE, png(late)))

    (sample,) = session.tree.samples()
    assert sample.token_ids.tolist() == [*ids, *text_ids("two"), END_ID] and sample.media == shown
    for each in sample.media:
        place = slice(each.start, each.start + each.length)
        assert sample.token_ids[place].tolist() == BLOCK and (sample.versions[place] == -1).all()
    assert (sample.versions == VERSION).sum() == len("one") + len("two") + 2
    assert [len(node.media) for node in session.tree.nodes] == [2, 1]  # each image once
    assert "2 images" in session.tree.show(TOKENIZER.decode)


def test_another_image_in_the_same_words_is_another_branch():
    session = session_of("one", "two", "three")
    echo = {"role": "assistant", "content": "one"}
    ask(session, user("a", picture(1)))
    ask(session, user("a", picture(1)), echo, user("b"))
    ask(session, user("a", picture(2)), echo, user("b"))
    same, other = session.tree.samples()
    assert [sample.media[0].data for sample in (same, other)] == [png(picture(1)), png(picture(2))]
    assert (other.versions >= 0).sum() == len("three") + 1  # its "one" is the client's


def test_the_spelling_of_a_placeholder_is_text():
    session = session_of("one")
    ask(session, user("<image><fake_token_around_image>", picture(1)))
    ids, media = session.call_model.given[0]
    assert ids.count(IMAGE) == 4 and [each.start for each in media] == [ids.index(FAKE)]


def test_a_model_that_samples_a_placeholder_cannot_go_on_where_images_are_shown():
    session = session_of("abc", "d")
    ask(session, user("a", picture(1)))
    node = session.tree.nodes[0]
    node.token_ids[1] = IMAGE  # the scripted model can only spell it
    with pytest.raises(ChatError, match="has sampled the token of an image"):
        ask(session, user("a", picture(1)), node.messages[-1], user("b"))
    assert session.failure is None


def pdf() -> bytes:
    Image.new("RGB", (8, 8)).save(file := io.BytesIO(), "PDF")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (png(picture(1))[:-30], "cannot be read"),
        (b"GIF89a no more", "cannot be read"),
        (pdf(), "cannot be read"),
        (b"", "cannot be read"),
    ],
)
def test_what_is_no_image_is_refused(data, why):
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    assert why in refused(session_of(), {"role": "user", "content": [part]}).message


def test_an_image_that_would_fill_the_memory_is_refused_unread():
    side = int(MAX_PIXELS**0.5) + 1
    Image.new("1", (side, side)).save(file := io.BytesIO(), "PNG")
    assert len(file.getvalue()) < 1 << 20
    with pytest.raises(ValueError, match="pixels"):
        open_image(file.getvalue())


def test_a_shape_that_the_processor_refuses_is_refused():
    class Narrow:
        image_token, image_token_id = "<image>", IMAGE

        def __call__(self, **_):
            raise ValueError("absolute aspect ratio must be smaller than 200")

    renderer = ChatRenderer(TOKENIZER, images=ImageReader(Narrow()))
    message = refused(session_of(renderer=renderer), user(picture(1, 400, 1))).message
    assert "400 x 1" in message and "aspect ratio" in message


def test_a_template_that_leaves_an_image_out_is_refused():
    tokenizer = vlm_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("'<image>' if part.type == 'image' else part.text", "''")
    renderer = ChatRenderer(tokenizer, images=ImageReader(vlm_processor(TOKENIZER)))
    assert "shows 0 of these 1 images" in refused(session_of(renderer=renderer), user("a", picture(1))).message


def test_the_tokens_of_images_count_for_the_context():
    assert refused(session_of(max_len=40), user(*map(picture, range(5)))).code == "context_length_exceeded"
    assert ask(session_of("x", max_len=60), user(picture(1)), max_tokens=1).prompt_tokens < 40


def test_a_photograph_is_shown_upright_and_in_rgb():
    upright = Image.new("L", (20, 10), 0)
    upright.paste(255, (0, 0, 10, 10))  # white on the left
    turned, exif = upright.rotate(90, expand=True), Image.Exif()
    exif[0x0112] = 6  # "rotate 90 clockwise to view"
    turned.save(file := io.BytesIO(), "PNG", exif=exif)
    shown = open_image(file.getvalue())
    assert shown.mode == "RGB" and np.array_equal(np.asarray(shown)[..., 0], np.asarray(upright))


@pytest.mark.parametrize("scheme", ["file://{}/a.png", "http://127.0.0.1:9/a.png", "https://127.0.0.1:9/a.png"])
def test_urls_are_never_fetched(scheme, tmp_path):
    (tmp_path / "a.png").write_bytes(png(picture(1)))
    part = {"type": "image_url", "image_url": {"url": scheme.format(tmp_path)}}
    with pytest.raises(ChatError, match="not allowed"):
        read_images([{"role": "user", "content": [part]}])


def test_the_images_of_a_request_are_bounded_together(monkeypatch):
    assert "17 images" in refused(session_of(), user(*[picture(1)] * (MAX_IMAGES + 1))).message
    monkeypatch.setattr("molt.chat.images.MAX_PIXELS", 2 * 40 * 40 + 10)
    assert len(read_images([user(picture(1, 40, 40), picture(2, 40, 40), picture(3, 2, 5))])) == 3
    assert "10 of 3,210 are left" in refused(
        session_of(), user(picture(1, 40, 40), picture(2, 40, 40)), user(picture(3, 1, 11))
    ).message  # fmt: skip


def test_what_was_shown_in_earlier_turns_may_come_again():
    """As after an edit, when everything is rendered anew: each turn brought no more than it may."""

    def turns(count):
        return [user(picture(1, 2, 2)), {"role": "assistant", "content": "seen"}] * count + [user("and?")]

    assert len(read_images(turns(40))) == 40
    crowded = [user(*[picture(1, 2, 2)] * (2 * MAX_IMAGES + 1)), *turns(0)]
    assert "33 images" in refused(session_of(), *crowded).message


def test_a_model_of_text_alone_has_no_reader_and_a_broken_processor_is_a_wrong_set_up(tmp_path):
    assert load_image_reader(str(save_tiny(tmp_path / "text"))) is None
    directory = save_tiny_vlm(tmp_path / "vlm")
    assert load_image_reader(str(directory)).token_id == IMAGE
    (directory / "processor_config.json").unlink()
    with pytest.raises(ConfigError, match="its processor cannot be loaded"):
        load_image_reader(str(directory))


class Qwen3VLReader:
    """As `Qwen3VLProcessor` reads images, whose video part would need torchvision."""

    def __init__(self, tokenizer):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        size = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
        self.image_processor = Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, size=size)
        self.image_token, self.image_token_id = "<|image_pad|>", tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def __call__(self, text, images, **_):
        grid = self.image_processor(images=images, return_tensors="np")["image_grid_thw"][0]
        return {"input_ids": [[self.image_token_id] * (int(grid.prod()) // 4)]}


def test_a_family_that_reads_images_itself_leaves_them_to_the_processor():
    tokenizer = char_tokenizer((TEMPLATES / "qwen3_vl.jinja").read_text())
    names = [f"<|{name}|>" for name in ("endoftext", "vision_start", "vision_end", "image_pad", "video_pad")]
    names += [f"<{slash}{name}>" for name in ("tool_call", "tool_response", "think") for slash in ("", "/")]
    tokenizer.add_tokens([AddedToken(name, special=name[1] == "|", normalized=False) for name in names])
    renderer = ChatRenderer(tokenizer, images=ImageReader(Qwen3VLReader(tokenizer)))
    assert renderer.family == "qwen3-vl"
    session = session_of("one", "two", renderer=renderer)
    first, echo = user("a", picture(1, 64, 96)), {"role": "assistant", "content": "one"}
    ask(session, first)
    ask(session, first, echo, user(picture(2, 64, 32), "b"))
    (sample,) = session.tree.samples()
    assert [each.length for each in sample.media] == [2 * 3, 2 * 1]  # pictures of 32 x 32 pixels
    shown = renderer.tokenizer.decode(sample.token_ids.tolist()).replace("<|image_pad|>", "#")
    assert shown == (
        "<|im_start|>user\na<|vision_start|>######<|vision_end|><|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|>##<|vision_end|>b<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    )
    for each in sample.media:
        assert set(sample.token_ids[each.start : each.start + each.length]) == {renderer.images.token_id}
