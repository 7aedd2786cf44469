"""Images of a chat: from the URL in a message to the tokens that stand for it.

A template writes one placeholder for each image; the model's own processor says which tokens belong in its place. They
are put there before the engine is called, so that limits and usage count them; the engine does the same for itself,
and its result must equal the record (`engine_worker.generate`).

Not here: other media; models whose template writes another token for an image than their processor expands.
"""

import base64
import io
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from molt.chat.protocol import ChatError, Message, PolicyRefusal
from molt.errors import ConfigError
from molt.hub import only_local
from molt.types import Media

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Of an animation the first picture is shown."""
MAX_IMAGES = 16
"""Images that one request may bring; the earlier ones of its conversation are not read again."""
MAX_PIXELS = 50_000_000
"""Pixels that one request may bring."""


def open_image(data: bytes, max_pixels: int = MAX_PIXELS) -> "Image.Image":
    """The image as the model is shown it: upright, RGB. Raises `ValueError` for what is none, or too large."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > max_pixels:
                raise ValueError(f"{image.width} x {image.height} pixels, {max_pixels:,} of {MAX_PIXELS:,} are left")
            return ImageOps.exif_transpose(image).convert("RGB")
    # Whatever decoders raise about a broken file, and about one that would fill the memory.
    except (OSError, EOFError, SyntaxError, NotImplementedError, struct.error, Image.DecompressionBombError) as error:
        raise ValueError(str(error)) from error


class File(NamedTuple):
    """An image as it came, and as the model is shown it."""

    data: bytes
    image: "Image.Image"


def read_images(messages: Sequence[Message]) -> list[File]:
    """All images in the messages, in order. Raises ChatError."""
    urls = _image_urls(messages)
    answers = [message for message in messages if message["role"] == "assistant"]
    turns = len(answers) + 1  # images of earlier turns may come again when the whole conversation is rendered
    if len(urls) > MAX_IMAGES * turns:
        raise _refused(f"{len(urls)} images at once: at most {MAX_IMAGES} are read. Send fewer in one request.")

    files = []
    pixels_left = MAX_PIXELS * turns
    for url in urls:
        file = _read(url, min(pixels_left, MAX_PIXELS))
        pixels_left -= file.image.width * file.image.height
        files.append(file)
    return files


def _image_urls(messages: Sequence[Message]) -> list[str]:
    urls = []
    for message in messages:
        if not isinstance(message["content"], list):
            continue
        for part in message["content"]:
            if part["type"] == "image_url":
                urls.append(part["image_url"]["url"])
    return urls


def _read(url: str, max_pixels: int) -> File:
    if not url.startswith("data:"):
        raise _refused(f"the image {url[:80]!r} would have to be fetched: not allowed here. Send it as a `data:` URL.")
    encoded = url.partition("base64,")[2]
    try:
        data = base64.b64decode(encoded, validate=True)
        return File(data=data, image=open_image(data, max_pixels))
    except ValueError as error:
        raise _refused(
            f"the image {url[:40]!r} cannot be read ({error}). Send {', '.join(FORMATS)} as a base64 `data:` URL."
        ) from error


class ImageReader:
    """The image processor of one model. Safe to use from several threads."""

    def __init__(self, processor: Any):
        """`processor`: from `transformers`, with an `image_token`."""
        self.processor = processor
        self.token_id: int = processor.image_token_id

    def place(
        self, ids: Sequence[int], start: int, files: Sequence[File], before: Sequence[Media]
    ) -> tuple[list[int], tuple[Media, ...]]:
        """`ids` with the tokens of each image in the place of its placeholder, and all the images there are.

        From `start` on placeholders stand for `files`; up to there the images `before` are in place. Raises ChatError.
        """
        ids = list(ids)
        places = [index for index in range(start, len(ids)) if ids[index] == self.token_id]
        if len(places) != len(files):
            raise _refused(
                f"the model's chat template shows {len(places)} of these {len(files)} images. Send them as a user."
            )
        if files or before:
            self._require_no_sampled_placeholder(ids[:start], before)

        placed = ids[:start]
        media = list(before)
        copied = start
        for place, file in zip(places, files, strict=True):
            placed += ids[copied:place]
            tokens = self._tokens(file.image)
            media.append(Media(start=len(placed), length=len(tokens), token_id=self.token_id, data=file.data))
            placed += tokens
            copied = place + 1
        placed += ids[copied:]
        return placed, tuple(media)

    def _require_no_sampled_placeholder(self, ids: list[int], media: Sequence[Media]) -> None:
        """Raise ChatError if a placeholder stands outside the images."""
        inside = 0
        for image in media:
            inside += ids[image.start : image.start + image.length].count(self.token_id)
        if ids.count(self.token_id) != inside:
            raise PolicyRefusal(
                400,
                "invalid_request",
                "the model has sampled the token of an image itself, which cannot be told from an image: the "
                "conversation cannot go on. Start a new one.",
            )

    def _tokens(self, image: "Image.Image") -> list[int]:
        try:
            read = self.processor(text=[self.processor.image_token], images=[image], add_special_tokens=False)
        except ValueError as error:  # a processor does not take every shape
            raise _refused(
                f"an image of {image.width} x {image.height} pixels is refused by the model's processor ({error}). "
                "Send another size."
            ) from error
        return list(read["input_ids"][0])


def load_image_reader(model_name_or_path: str) -> ImageReader | None:
    """Of a model that takes images; None of any other. Raises ConfigError."""
    from transformers import AutoProcessor, PreTrainedConfig

    local = only_local(model_name_or_path)
    try:
        config, _ = PreTrainedConfig.get_config_dict(model_name_or_path, local_files_only=local)
    except OSError:  # a tokenizer alone
        return None
    if "vision_config" not in config:
        return None
    try:
        processor = AutoProcessor.from_pretrained(model_name_or_path, trust_remote_code=False, local_files_only=local)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"`actor.model_name_or_path` (={model_name_or_path}): the model takes images, but its processor cannot be "
            f"loaded ({str(error).strip().splitlines()[0]}), so no image could be shown. Install what it names, or "
            "complete the directory (preprocessor_config.json)."
        ) from error
    if getattr(processor, "image_token_id", None) is None:
        return None
    return ImageReader(processor)


def _refused(why: str) -> ChatError:
    return ChatError(400, "invalid_request", why)
