"""`molt demo`: a model that did not exist a minute ago learns a task, on this machine.

Builds a tiny Qwen3-style model with a character tokenizer of its own, teaches it the task badly by SFT,
then well by asynchronous RL: real Ray, real vLLM, real FSDP2. The two commands are printed and can be
run by hand; everything lands in one folder.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from molt.errors import ConfigError
from molt.paths import expanded

AGENT_FILE = Path(__file__).with_name("demo_task.py")
HELD_OUT = 512
SFT_ROWS = 8_192
RL_ROWS = 16_384
SLIPS = 0.12
"""The SFT answers are a careless teacher's, about half of them wrong, so that RL has something to correct."""
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="molt demo", description=__doc__, epilog="Other flags are those of `molt rl`, for the RL run."
    )
    parser.add_argument(
        "--output_dir", type=expanded, default=Path("demo"), help="where everything lands (default: ./demo)"
    )
    parser.add_argument("--train.seed", dest="seed", type=int, default=42, help="seed of data, model and sampling")
    known, rl_flags = parser.parse_known_args(argv)
    run_demo(known.output_dir, known.seed, rl_flags)


def run_demo(folder: Path, seed: int, rl_flags: list[str]) -> None:
    """The whole demo. `rl_flags` override the flags of the RL run."""
    console = Console(highlight=False, soft_wrap=True)
    started = time.monotonic()
    console.print("[bold]molt demo[/]: a tiny model learns to say five digits backwards", "\n")
    start_afresh(folder)
    console.print(f"[bold]1. data and model[/] → {folder}")
    build_data(folder, seed)
    parameters = build_model(folder / "model", seed)
    console.print(f"   {SFT_ROWS:,} SFT, {RL_ROWS:,} RL and {HELD_OUT} held-out prompts; {parameters:,} parameters\n")

    console.print("[bold]2. SFT[/] to a mediocre policy")
    _run(console, "molt.cli.train_sft", sft_flags(folder, seed))
    console.print("\n[bold]3. asynchronous RL[/] with the reward “is it right?”")
    _run(console, "molt.cli.train_rl_ray", [*rl_defaults(folder, seed), *rl_flags])

    before, after = evaluations(folder / "rl" / "run" / "metrics.jsonl")
    seconds = time.monotonic() - started
    console.print(f"\n[bold]done[/] in {seconds:.0f} s. Look at:")
    console.print(f"   {folder}/rl/run/report.html      curves, events, rollouts token by token")
    console.print(f"   {folder}/rl                      the final Hugging Face model")
    console.print(f"   {AGENT_FILE}   the agent: change its reward and run again")
    print(f"demo pass@1 before={before:.2f} after={after:.2f}")


def start_afresh(folder: Path) -> None:
    """An empty folder; that of an earlier demo is replaced, anything else is left alone."""
    marker = folder / ".molt-demo"
    if folder.exists() and any(folder.iterdir()) and not marker.exists():
        raise ConfigError(
            f"--output_dir (={folder}) holds files that are not a demo's: they would be mixed with it. "
            "Name an empty or a new folder."
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    marker.touch()


def sft_flags(folder: Path, seed: int) -> list[str]:
    return [
        "--model.model_name_or_path", f"{folder}/model",
        "--model.gradient_checkpoint", "none",
        "--data.dataset", f"{folder}/data/sft.jsonl",
        "--data.output_key", "label",
        "--data.max_len", "32",
        "--train.batch_size", "64",
        "--train.micro_batch_size", "64",
        "--train.max_epochs", "1",
        "--train.seed", str(seed),
        "--adam.lr", "3e-3",
        "--lr_scheduler", "cosine",
        "--logger.logging_steps", "16",
        "--ckpt.output_dir", f"{folder}/sft",
    ]  # fmt: skip


def rl_defaults(folder: Path, seed: int) -> list[str]:
    return [
        "--actor.model_name_or_path", f"{folder}/sft",
        "--actor.gradient_checkpoint", "none",
        "--actor.adam.lr", "5e-4",
        "--actor.lr_scheduler", "linear",
        "--data.prompt_dataset", f"{folder}/data/rl.jsonl",
        "--data.label_key", "label",
        "--data.apply_chat_template",
        "--data.max_len", "32",
        "--algo.advantage.estimator", "grpo",
        "--rollout.batch_size", "32",
        "--rollout.n_samples_per_prompt", "8",
        "--rollout.max_new_tokens", "8",
        "--train.agent_path", str(AGENT_FILE),
        "--train.micro_batch_size", "256",
        "--train.max_steps", "200",
        "--train.seed", str(seed),
        "--eval.dataset", f"{folder}/data/held_out.jsonl",
        "--eval.eval_at_start",
        "--eval.steps", "50",
        "--eval.n_samples_per_prompt", "1",
        "--logger.logging_steps", "10",
        "--ckpt.output_dir", f"{folder}/rl",
        "--ckpt.save_steps", "100",
    ]  # fmt: skip


def build_data(folder: Path, seed: int) -> None:
    """`data/{sft,rl,held_out}.jsonl`; no held-out prompt occurs in the other two."""
    from molt.cli import demo_task  # `molt demo --help` is instant

    held_out = demo_task.rows(HELD_OUT, seed)
    seen = frozenset(row["input"] for row in held_out)
    train = demo_task.rows(SFT_ROWS + RL_ROWS, seed + 1, exclude=seen)
    taught = [demo_task.careless(row, seed, SLIPS) for row in train[:SFT_ROWS]]
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    _write_rows(data / "held_out.jsonl", held_out)
    _write_rows(data / "sft.jsonl", taught)
    _write_rows(data / "rl.jsonl", train[SFT_ROWS:])


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))


def build_model(path: Path, seed: int, words: Sequence[str] = (), chat_template: str = CHAT_TEMPLATE) -> int:
    """A random Qwen3 with a character tokenizer, `words` being tokens too; returns its number of parameters."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *"0123456789 "])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=SPECIAL[0], eos_token=SPECIAL[1], additional_special_tokens=SPECIAL[2:]
    )
    tokenizer.add_tokens(list(words))
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(path)
    disable_progress_bar()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the smallest that vLLM's CPU attention runs
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(path)
    return model.num_parameters()


def evaluations(metrics: Path) -> tuple[float, float]:
    """pass@1 of the first and the last evaluation."""
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    scores = [step["eval/reverse/pass1"] for step in steps if step.get("eval/reverse/pass1") is not None]
    return scores[0], scores[-1]


def _run(console: Console, module: str, flags: list[str]) -> None:
    command = " ".join(flags)
    console.print(f"   [dim]python -m {module} {command}[/]")
    result = subprocess.run([sys.executable, "-m", module, *flags], check=False)
    if result.returncode != 0:
        raise SystemExit(result.returncode)
