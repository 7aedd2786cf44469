"""Content tokens per second of SFT against `transformers.Trainer`, both tuned, on one thread in float32.

    python benchmarks/sft_throughput.py [--rounds 3]

A Qwen3 of 2M parameters, 2,048 conversations of 2 to 40 tokens (log-uniform), 256 a step, one epoch a round; all
tokens but the first of a conversation are trained. The Trainer groups by length (`train_sampling_strategy`) and pads,
with fused AdamW and neither logs nor saves; molt runs the steps of `molt sft`. First each side tries its settings
(micro-batch size; token budget, padded or packed), then the best of both alternate. Time is what the one thread
computed (`process_time`), so a busy machine does not count. Tokens are those of the conversations, never padding.
It fails when the two losses of the first step differ by more than 1e-4 of them.
Last line: `sft_throughput ratio=MOLT/TRAINER`, above 1 molt is faster.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _common import spread
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from molt.config import AdamConfig, CkptConfig, FsdpConfig, ModelConfig
from molt.config_sft import SftConfig, SftDataConfig, SftTrainConfig
from molt.parallel.mesh import init_distributed
from molt.parallel.shape import MeshShape
from molt.train.sft import SftRun
from tests.tiny import char_tokenizer, save_tiny, tiny_qwen3

CONVERSATIONS = 2_048
BATCH = 256
SHORTEST = 2
LONGEST = 40
LR = 1e-4
# One token of prompt, then the answer: the length of a conversation is what we ask for.
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
ALPHABET = "".join(chr(0x4E00 + i) for i in range(2_000))
TRAINER_SETTINGS = [(size, BATCH // size) for size in (256, 128, 64, 32, 16)]
MOLT_BUDGETS = [(packed, tokens) for packed in (False, True) for tokens in (1_024, 2_048, 4_096)]


def prepare(folder: Path) -> None:
    rng = random.Random(0)
    save_tiny(
        folder / "model",
        tiny_qwen3(vocab_size=len(ALPHABET) + 3, layers=4, hidden=192, heads=6, kv_heads=2),
        char_tokenizer(TEMPLATE, ALPHABET),
    )
    with (folder / "data.jsonl").open("w") as file:
        for _ in range(CONVERSATIONS):
            length = round(SHORTEST * (LONGEST / SHORTEST) ** rng.random())
            text = "".join(rng.choices(ALPHABET, k=length))
            file.write(json.dumps({"input": text[0], "output": text[1:]}) + "\n")


def molt_run(folder: Path, mesh, packed: bool, max_tokens: int, rows: int | None = None) -> SftRun:
    config = SftConfig(
        adam=AdamConfig(lr=LR),
        model=ModelConfig(str(folder / "model"), gradient_checkpoint="none"),
        fsdp=FsdpConfig(device="cpu", packing_samples=packed),
        data=SftDataConfig(dataset=str(folder / "data.jsonl"), output_key="output", max_len=64, max_samples=rows),
        train=SftTrainConfig(batch_size=BATCH, max_tokens_per_gpu=max_tokens, max_epochs=1),
        ckpt=CkptConfig(output_dir=folder / "out"),
    )
    return SftRun(config, mesh, torch.device("cpu"))


def molt_epoch(run: SftRun) -> tuple[float, float]:
    """Seconds of the thread, and the loss of the first step."""
    began = time.process_time()
    losses = [run._step(step)["train/loss"] for step in range(1, run.total_steps + 1)]
    return time.process_time() - began, losses[0]


def trainer_epoch(
    folder: Path, rows: list[dict], per_device: int, accumulation: int, sampling: str = "group_by_length"
) -> tuple[float, float]:
    """Seconds of the thread, and the mean loss of the steps."""
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        train_sampling_strategy=sampling,
        use_cpu=True,
        dataloader_pin_memory=False,
        dataloader_num_workers=0,
        remove_unused_columns=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model.config.use_cache = False
    trainer = Trainer(model, arguments, data_collator=pad, train_dataset=rows)
    began = time.process_time()
    trained = trainer.train()
    return time.process_time() - began, trained.training_loss


def pad(rows: list[dict]) -> dict[str, torch.Tensor]:
    columns = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {name: pad_sequence([row[name] for row in rows], True, value) for name, value in columns.items()}


def as_rows(run: SftRun) -> list[dict]:
    """molt's conversations as the Trainer takes them."""
    ids = [torch.tensor(c.token_ids).long() for c in run.conversations]
    masks = [torch.tensor(c.mask) for c in run.conversations]
    return [
        {"input_ids": i, "labels": i.masked_fill(~m, -100), "attention_mask": torch.ones_like(i)}
        for i, m in zip(ids, masks, strict=True)
    ]


def fastest(settings: list[tuple], speed: Callable[[tuple], float], label: str) -> tuple:
    """Try each once."""
    speeds = {}
    for setting in settings:
        speeds[setting] = speed(setting)
        print(f"{label.format(*setting)}: {speeds[setting]:,.0f} tokens/s", flush=True)
    return max(speeds, key=speeds.get)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    mesh = init_distributed(0, MeshShape(), "", 0, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        one = molt_run(folder, mesh, False, 4_096, rows=BATCH)
        ours = molt_epoch(one)[1]
        theirs = trainer_epoch(folder, as_rows(one), BATCH, 1, "sequential")[1]
        print(f"loss of the first step: molt {ours:.6f}, trainer {theirs:.6f}")
        rows = as_rows(molt_run(folder, mesh, False, 4_096))
        assert len(rows) == CONVERSATIONS, f"{CONVERSATIONS - len(rows)} conversations were dropped"
        tokens = sum(len(row["input_ids"]) for row in rows)

        def speed_of_molt(setting: tuple[bool, int]) -> float:
            return tokens / molt_epoch(molt_run(folder, mesh, *setting))[0]

        def speed_of_trainer(setting: tuple[int, int]) -> float:
            return tokens / trainer_epoch(folder, rows, *setting)[0]

        best = fastest(MOLT_BUDGETS, speed_of_molt, "molt, packed={}, {:,} tokens")
        best_size = fastest(TRAINER_SETTINGS, speed_of_trainer, "trainer, {} x {}")
        pairs = [(speed_of_molt(best), speed_of_trainer(best_size)) for _ in range(rounds)]
    for side, speeds in zip(("molt", "trainer"), zip(*pairs, strict=True), strict=True):
        print(f"{side:8} {spread(speeds, 0)} tokens/s")
    ratios = [molt / trainer for molt, trainer in pairs]
    print(f"ratio {spread(ratios)} over {rounds} rounds")
    print(f"sft_throughput ratio={statistics.median(ratios):.2f}")
    if abs(ours - theirs) > 1e-4 * abs(theirs):
        sys.exit("the two losses differ: the sides do not compute the same")


if __name__ == "__main__":
    main()
