"""Supervised fine-tuning: conversation → batch → loss → step.

    molt sft ...                              one process
    torchrun --nproc_per_node 2 -m molt.cli.train_sft ...

The position in the data is a pure function of the step: epoch e visits the conversations in an order that
only the seed and e decide (`EpochOrder`), and step s takes the next `batch_size` of them (an epoch's last
step takes what is left). So the step number is all that a resume needs.
"""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from molt.algo.reduce import token_weights
from molt.batch.collate import Batch, collate, scatter
from molt.batch.partition import micro_batches, partition
from molt.chat.render import load_tokenizer
from molt.checkpoint_files import read_json, write_json
from molt.config_sft import SftConfig
from molt.data.conversations import Conversation, build_conversations
from molt.data.mixture import EpochOrder
from molt.data.rows import load_rows
from molt.models.build import build_policy
from molt.parallel.mesh import all_reduce_sums, init_distributed, resolve_device, saving_group, single_threaded_on_cpu
from molt.report.metrics import values
from molt.report.sinks import RunLog
from molt.train.checkpoint import (
    begin,
    checkpoint_step,
    commit,
    export_hf,
    failing,
    latest_checkpoint,
    load_checkpoint,
    prune,
    removing,
    require_same_run,
    temporary,
    write_part,
    written,
)
from molt.train.optimizer import build_optimizer, build_scheduler
from molt.train.step import dummy_batch, optimizer_step
from molt.types import Metric


@dataclass(frozen=True)
class MicroBatch:
    """What the loss of one forward/backward reads; tensors are `[B, T]`."""

    batch: Batch
    mask: Tensor
    """bool, the trained tokens."""
    weights: Tensor
    """float32, `1 / N` with N trained tokens in the step batch of all ranks, 0 where the mask is off."""


def run_sft(config: SftConfig, settings: str = "") -> None:
    """Train, evaluate, checkpoint and export. Every rank calls it; without torchrun there is one.

    settings: what `run/config.toml` will hold, once it is sure that the run may go on here.
    On SIGTERM it saves a checkpoint after the current step and returns.
    Raises a `MoltError` for settings, data and checkpoints that cannot be used, and for a step that went wrong.
    """
    # torchrun's protocol; a single process has none of these.
    rank, local_rank, port = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"))
    world_size, address = int(os.environ.get("WORLD_SIZE", 1)), os.environ.get("MASTER_ADDR", "")
    device = resolve_device(config.fsdp.device, local_rank)
    single_threaded_on_cpu(device)
    torch.manual_seed(config.train.seed)
    mesh = init_distributed(rank, world_size, address, port, device)
    try:
        run = SftRun(config, mesh, device, settings)
        with Termination() as termination:
            run.train(termination)
    finally:
        dist.destroy_process_group()


class Termination:
    """Remembers a SIGTERM while the context is open."""

    def __enter__(self) -> "Termination":
        self.asked = False
        self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def _ask(self, *_: object) -> None:
        self.asked = True

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def anywhere(self, device: torch.device) -> bool:
        # Collective on the default group: every rank, once per step. Ranks are signalled at different moments.
        return all_reduce_sums(torch.tensor(float(self.asked), device=device)).item() > 0


class SftRun:
    """Model, optimizer and data of one rank. Every method is collective: all ranks call it."""

    def __init__(self, config: SftConfig, mesh, device: torch.device, settings: str = ""):
        self.config, self.device, self.settings = config, device, settings
        self.rank, self.world_size = mesh.get_rank(), mesh.size()
        model = config.model.model_name_or_path
        self.tokenizer = load_tokenizer(model, config.data.chat_template, flag="model.model_name_or_path")
        data, shares = config.data, config.data.dataset_probs
        self.conversations, self.dropped, sizes = self._conversations(
            data.dataset, "data.dataset", data.dataset_split, max_samples=data.max_samples, each=shares is not None
        )
        self.order = EpochOrder(sizes, seed=config.train.seed, shares=shares, flag="data.dataset_probs")
        self.held_out: list[Conversation] = []
        if config.eval.dataset:
            self.held_out, *_ = self._conversations(config.eval.dataset, "eval.dataset", config.eval.split)
        self.steps_per_epoch = -(-len(self.order) // config.train.batch_size)
        self.total_steps = self.steps_per_epoch * config.train.max_epochs
        if config.train.max_steps is not None:
            self.total_steps = min(self.total_steps, config.train.max_steps)
        self.model = build_policy(config.model, config.fsdp, mesh, device, config.data.max_len)
        self.optimizer = build_optimizer(self.model, config)
        self.scheduler = build_scheduler(self.optimizer, config, self.total_steps)
        self.saving = saving_group()
        self.writing: Future | None = None
        """The checkpoint that is being written; one at a time."""

    def train(self, termination: Termination) -> None:
        """All steps from the newest checkpoint on. A checkpoint that was begun is completed, whatever happens."""
        with ThreadPoolExecutor(1) as self.writer:
            self._train(termination)

    def _train(self, termination: Termination) -> None:
        ckpt, start = self.config.ckpt, self._resume()
        log = self._open_log(start) if self.rank == 0 else None
        saved, stop = start, False
        for step in range(start + 1, self.total_steps + 1):
            metrics = self._step(step)
            if self._evaluates(step):
                metrics |= {"eval/loss": self.evaluate()}
            if log:
                log.step(step, metrics)
            if self.writing is not None and self.writing.done():
                self._settle()
            stop = termination.anywhere(self.device)
            if stop or (ckpt.save_steps > 0 and step % ckpt.save_steps == 0):
                self._save(step)
                saved = step
            if stop:
                break
        final = not stop and not ckpt.disable_final_save
        if final and saved != self.total_steps:
            self._save(self.total_steps)
        self._settle()
        if final:
            export_hf(self.model, self.tokenizer, ckpt.output_dir)
        if log:
            log.close()

    def evaluate(self) -> float:
        """Mean loss per trained token of the held-out conversations, over all ranks."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for m in self._micro_batches(self.held_out):
                # Every rank runs the same number of forwards: FSDP gathers parameters in each of them.
                logprobs, _ = self.model(m.batch if m else dummy_batch(), needed=m.mask if m else None)
                if m:
                    sums -= torch.stack([(logprobs * m.mask).sum().double(), -m.mask.sum().double()])
        # Collective on the default group: every rank.
        loss, tokens = all_reduce_sums(sums).tolist()
        return loss / tokens

    def _conversations(
        self, paths: str, flag: str, split: str, **bounds: Any
    ) -> tuple[list[Conversation], str, list[int]]:
        """The conversations, an account of the rows that were dropped, and how many are left of each dataset."""
        rows = load_rows(paths, flag=flag, split=split, **bounds)
        conversations, report = build_conversations(rows, self.config.data, self.tokenizer)
        return conversations, report.message(), report.left(rows.sizes)

    def _open_log(self, start: int) -> RunLog:
        header = f"SFT: {len(self.conversations):,} conversations, {self.total_steps:,} steps on {self.device.type}"
        header += f"\n{self.dropped}" if self.dropped else ""
        resume_step = start if self.config.ckpt.load_enable else None
        log = RunLog(self.config.ckpt.run_dir, self.config.logger, header, self.total_steps, resume_step)
        if self.settings:
            (self.config.ckpt.run_dir / "config.toml").write_text(self.settings, encoding="utf-8")
        return log

    def _step(self, step: int) -> dict[str, float]:
        """Optimizer step number `step`, from 1."""
        began = time.perf_counter()
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        size = self.config.train.batch_size
        chosen = [self.conversations[i] for i in self.order.rows(epoch)[position * size : (position + 1) * size]]
        metrics = optimizer_step(
            self.model,
            self.optimizer,
            self.scheduler,
            self._micro_batches(chosen),
            negative_log_likelihood,
            max_norm=self.config.max_norm,
        )
        tokens = sum(len(c.token_ids) for c in chosen)
        metrics["perf/tokens_per_s"] = Metric(tokens, time.perf_counter() - began)
        return values(metrics)

    def _micro_batches(self, chosen: Sequence[Conversation]) -> list[MicroBatch | None]:
        """This rank's share of a step batch; None where only other ranks have a micro-batch left."""
        train, packed = self.config.train, self.config.fsdp.packing_samples
        weights = token_weights([int(c.mask.sum()) for c in chosen])
        lengths = [len(c.token_ids) for c in chosen]
        shares = partition(lengths, self.world_size)
        mine = micro_batches(
            shares, lengths, size=train.micro_batch_size, max_tokens=train.max_tokens_per_gpu, packed=packed
        )[self.rank]
        return [self._micro_batch([(chosen[i], weights[i]) for i in indices]) for indices in mine]

    def _micro_batch(self, weighted: list[tuple[Conversation, float]]) -> MicroBatch | None:
        if not weighted:
            return None
        batch = collate([c.token_ids for c, _ in weighted], packed=self.config.fsdp.packing_samples)
        mask = scatter(batch, [c.mask for c, _ in weighted])
        weights = scatter(batch, [np.float32(weight) * c.mask for c, weight in weighted])
        return MicroBatch(batch, mask.to(self.device), weights.to(self.device))

    def _evaluates(self, step: int) -> bool:
        every = self.config.eval.steps if self.config.eval.steps > 0 else self.steps_per_epoch
        return bool(self.held_out) and (step % every == 0 or step == self.total_steps)

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a step number to mean the same conversations."""
        train = self.config.train
        return {**self.order.identity, "batch_size": train.batch_size, "seed": train.seed}

    def _resume(self) -> int:
        """Steps already taken."""
        ckpt = self.config.ckpt
        path = latest_checkpoint(ckpt.checkpoints) if ckpt.load_enable else None
        if path is None:
            return 0
        require_same_run(path, read_json(path / "extra.json")["data"], self._identity())
        load_checkpoint(path, self.model, self.optimizer, self.scheduler)
        return checkpoint_step(path)

    def _save(self, step: int) -> None:
        """A checkpoint, owned by rank 0. With `ckpt.async_save` it is written while training goes on."""
        self._settle()
        ckpt, tmp = self.config.ckpt, temporary(self.config.ckpt.checkpoints, step)
        with (removing if self.rank == 0 else failing)(tmp):
            if self.rank == 0:
                begin(ckpt.checkpoints, step)
            dist.barrier()  # default group, every rank: nobody writes before the directory is empty
            state = (self.model, self.optimizer, self.scheduler)
            part = write_part(tmp, *state, group=self.saving, background=ckpt.async_save)
            if ckpt.save_hf:
                export_hf(self.model, self.tokenizer, tmp / "hf")
        self.writing = self.writer.submit(self._commit, tmp, part, {"step": step, "data": self._identity()})
        if not ckpt.async_save:
            self._settle()

    def _commit(self, tmp: Path, part: Future, extra: Mapping[str, Any]) -> None:
        """Wait for this rank's part, the last of which is rank 0's; it then finishes the checkpoint."""
        with (removing if self.rank == 0 else failing)(tmp):
            written(tmp, part)
            if self.rank == 0:
                write_json(tmp / "extra.json", extra)
                commit(tmp)
                prune(self.config.ckpt.checkpoints, self.config.ckpt.max_num, self.config.ckpt.max_mem * 2**30)

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written. Raises what went wrong with it."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()


def negative_log_likelihood(model: nn.Module, m: MicroBatch) -> tuple[Tensor, dict[str, Metric]]:
    """`-sum(weight * log p(token))` over the trained tokens."""
    logprobs, entropy = model(m.batch, needed=m.mask)
    metrics = {"train/entropy": Metric(float((entropy.detach() * m.mask).sum()), float(m.mask.sum()))}
    return -(m.weights * logprobs).sum(), metrics
