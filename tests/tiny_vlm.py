"""A tiny vision-language model, built in memory: an Idefics3, whose processor needs no torchvision.

    directory = save_tiny_vlm(path)
    logprobs = vlm_logprobs(directory, sample.token_ids, [PIL images])

An image is seven tokens: `<fake_token_around_image>`, `<global-img>`, four times `<image>`, and the first again.
"""

import base64
import io
from pathlib import Path

import numpy as np

from tests.tiny import END_ID, PAD_ID, char_tokenizer

IMAGE_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
SIDE = 32
VLM_TEMPLATE = """
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.content is string %}{{- m.content }}
{%- else %}{%- for part in m.content %}{{- '<image>' if part.type == 'image' else part.text }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def vlm_tokenizer():
    from transformers import AddedToken

    tokenizer = char_tokenizer(VLM_TEMPLATE)
    specials = [AddedToken(token, special=True, normalized=False) for token in IMAGE_TOKENS]
    tokenizer.add_tokens(specials, special_tokens=True)
    return tokenizer


def vlm_processor(tokenizer):
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    size = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=VLM_TEMPLATE)


def save_tiny_vlm(path: str | Path, seed: int = 0) -> Path:
    """Save model, tokenizer and processor; the same seed gives the same weights, 0.17M of them."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    tokenizer = vlm_tokenizer()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 64**-0.5}
    ids = {"bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    text = {
        "model_type": "llama", "vocab_size": len(tokenizer), "intermediate_size": 128, "num_key_value_heads": 1,
        "head_dim": 32, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    }  # fmt: skip
    config = Idefics3Config(
        text_config=text | sizes | ids,
        vision_config=sizes | {"intermediate_size": 64, "image_size": SIDE, "patch_size": 8},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Idefics3ForConditionalGeneration(config).float().save_pretrained(path)
    vlm_processor(tokenizer).save_pretrained(path)
    return Path(path)


def vlm_logprobs(directory: str | Path, token_ids: np.ndarray, images: list) -> np.ndarray:
    """Plain transformers with the same pixels: entry t is log p(token t | before, images), 0 for the first."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(directory)
    pixels = processor.image_processor([[image] for image in images], return_tensors="pt")
    # One prompt with all the images, where the image processor makes one of each.
    pixels = {name: pixels[name].flatten(0, 1)[None] for name in ("pixel_values", "pixel_attention_mask")}
    ids = torch.as_tensor(np.asarray(token_ids, np.int64))[None]
    with torch.no_grad():
        values = model(input_ids=ids, **pixels).logits[0, :-1].double().log_softmax(-1)
    return np.concatenate([[0.0], values.gather(1, ids[0, 1:, None])[:, 0].numpy()])


def picture(seed: int, width: int = 40, height: int = 30):
    """A PIL image of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image) -> bytes:
    image.save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def data_url(image) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"
