"""Images of a chat: from the URL in a message to the tokens that stand for it.

A template writes one placeholder for each image; the model's own processor says which tokens belong in its place. They
are put there before the engine is asked, so that limits and usage count them; the engine does the same for itself,
and what it made must be what is recorded (`engine_worker.generate`).

Not here: other media; models whose template writes another token for an image than their processor expands.
"""

import base64
import io
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from molt.chat.protocol import ChatError, Message
from molt.errors import ConfigError
from molt.hub import only_local
from molt.types import Media

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Of an animation the first picture is shown."""
MAX_IMAGES, MAX_PIXELS = 16, 50_000_000
"""That one request may bring; the earlier ones of its conversation are not read again."""


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


def read_images(messages: Sequence[Message]) -> list["File"]:
    """All images in the messages, in order. Raises ChatError."""
    parts = [part for m in messages if isinstance(m["content"], list) for part in m["content"]]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    turns = 1 + sum(message["role"] == "assistant" for message in messages)  # what was rendered before may come again
    if len(urls) > MAX_IMAGES * turns:
        why = f"{len(urls)} images at once: at most {MAX_IMAGES} are read. Send fewer in one request."
        raise ChatError(400, "invalid_request", why)
    files, left = [], MAX_PIXELS * turns
    for url in urls:
        files.append(_read(url, min(left, MAX_PIXELS)))
        left -= files[-1].image.width * files[-1].image.height
    return files


class File(NamedTuple):
    """An image as it came, and as the model is shown it."""

    data: bytes
    image: "Image.Image"


def _read(url: str, max_pixels: int) -> File:
    if not url.startswith("data:"):
        why = f"the image {url[:80]!r} would have to be fetched: not allowed here. Send it as a `data:` URL."
        raise ChatError(400, "invalid_request", why)
    try:
        data = base64.b64decode(url.partition("base64,")[2], validate=True)
        return File(data, open_image(data, max_pixels))
    except ValueError as error:
        why = f"the image {url[:40]!r} cannot be read ({error}). Send {', '.join(FORMATS)} as a base64 `data:` URL."
        raise ChatError(400, "invalid_request", why) from error


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
        places = [i for i in range(start, len(ids)) if ids[i] == self.token_id]
        if len(places) != len(files):
            why = f"the model's chat template shows {len(places)} of these {len(files)} images. Send them as a user."
            raise ChatError(400, "invalid_request", why)
        inside = sum(ids[each.start : each.start + each.length].count(self.token_id) for each in before)
        if (files or before) and ids[:start].count(self.token_id) != inside:
            why = "the model has sampled the token of an image itself, which cannot be told from one: start anew."
            raise ChatError(400, "invalid_request", why)
        longer, media, end = ids[:start], [*before], start
        for place, file in zip(places, files, strict=True):
            longer += ids[end:place]
            tokens = self._tokens(file.image)
            media.append(Media(len(longer), len(tokens), self.token_id, file.data))
            longer += tokens
            end = place + 1
        return longer + ids[end:], tuple(media)

    def _tokens(self, image: "Image.Image") -> list[int]:
        try:
            read = self.processor(text=[self.processor.image_token], images=[image], add_special_tokens=False)
        except ValueError as error:  # it does not take every shape
            why = f"an image of {image.width} x {image.height} pixels is refused by the model's processor ({error})."
            raise ChatError(400, "invalid_request", f"{why} Send another size.") from error
        return list(read["input_ids"][0])


def load_image_reader(model_name_or_path: str) -> ImageReader | None:
    """Of a model that takes images; None of any other. Raises ConfigError."""
    from transformers import AutoProcessor, PreTrainedConfig

    local = {"local_files_only": only_local(model_name_or_path)}
    try:
        config, _ = PreTrainedConfig.get_config_dict(model_name_or_path, **local)
    except OSError:  # a tokenizer alone
        return None
    if "vision_config" not in config:
        return None
    try:
        processor = AutoProcessor.from_pretrained(model_name_or_path, trust_remote_code=False, **local)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"`actor.model_name_or_path` (={model_name_or_path}): the model takes images, but its processor cannot be "
            f"loaded ({str(error).strip().splitlines()[0]}), so no image could be shown. Install what it asks for, or "
            "complete the directory (preprocessor_config.json)."
        ) from error
    return ImageReader(processor) if getattr(processor, "image_token_id", None) is not None else None
