"""Supervised fine-tuning: conversation → batch → loss → step.

    molt sft ...                              one process
    torchrun --nproc_per_node 2 -m molt.cli.train_sft ...

The position in the data is a pure function of the step: epoch e visits the conversations in an order that only the
seed and e decide (`EpochOrder`), and step s takes the next `batch_size` of them (an epoch's last step takes what is
left). So the step number is all that a resume needs.
"""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from molt.algo.reduce import token_weights
from molt.batch.collate import Batch, collate, scatter
from molt.batch.partition import micro_batches, partition
from molt.chat.render import load_tokenizer, stop_ids
from molt.checkpoint_files import read_json, write_json
from molt.config_sft import SftConfig, SftDataConfig
from molt.data.conversations import Conversation, build_conversations
from molt.data.fingerprint import fingerprint
from molt.data.mixture import EpochOrder
from molt.data.rows import Rows, load_rows
from molt.models.build import build_policy
from molt.models.description import embedding_rows, load_config
from molt.models.forward import PolicyOutput
from molt.parallel.mesh import Mesh, init_distributed, resolve_device, single_threaded_on_cpu
from molt.parallel.shape import ALL_AXES, DATA_AXES, MeshShape
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
    require_same_rows,
    require_same_run,
    temporary,
    write_part,
    written,
)
from molt.train.optimizer import build_optimizer, build_scheduler
from molt.train.step import dummy_batch, optimizer_step
from molt.types import Metric

OF_SAMPLES = ("train/entropy",)
"""The metrics of `negative_log_likelihood`, each of this rank's samples."""
NOTHING = Metric(0.0, 0.0)
"""Of a rank that had no samples in a step."""


@dataclass(frozen=True)
class SftMicroBatch:
    """What the loss of one forward/backward reads; tensors are `[B, T]`."""

    batch: Batch
    mask: Tensor
    """bool, the trained tokens."""
    weights: Tensor
    """float32, `1 / N` with N trained tokens in the step batch of all ranks, 0 where the mask is off."""


@dataclass(frozen=True)
class RankPlace:
    """Which rank this process is, and where the ranks meet."""

    rank: int
    local_rank: int
    world_size: int
    address: str
    port: int

    @classmethod
    def from_environment(cls) -> Self:
        """As torchrun tells it; without torchrun nothing is set, and there is one rank."""
        return cls(
            rank=int(os.environ.get("RANK", 0)),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            address=os.environ.get("MASTER_ADDR", ""),
            port=int(os.environ.get("MASTER_PORT", 0)),
        )


def run_sft(config: SftConfig, settings: str = "") -> None:
    """Train, evaluate, checkpoint and export. Every rank calls it; without torchrun there is one.

    settings: what `run/config.toml` will hold, once it is sure that the run may go on here.
    On SIGTERM it saves a checkpoint after the current step and returns.
    Raises a `MoltError` for settings, data and checkpoints that cannot be used, and for a step that went wrong.
    """
    place = RankPlace.from_environment()
    device = resolve_device(config.fsdp.device, place.local_rank)
    single_threaded_on_cpu(device)
    torch.manual_seed(config.train.seed)
    shape = MeshShape(dp_shard=place.world_size)
    mesh = init_distributed(place.rank, shape, place.address, place.port, device)
    try:
        run = SftRun(config, mesh, device, settings)
        with Termination() as termination:
            run.train(termination)
    finally:
        mesh.close()


class Termination:
    """Remembers a SIGTERM while the context is open."""

    def __enter__(self) -> Self:
        self.signalled = False
        self._before = signal.signal(signal.SIGTERM, self._remember)
        return self

    def _remember(self, *_: object) -> None:
        self.signalled = True

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def anywhere(self, mesh: Mesh) -> bool:
        """Whether any rank was signalled."""
        signalled = torch.tensor(float(self.signalled), device=mesh.device)
        # Collective over all axes: every rank, once per step. Ranks are signalled at different moments.
        return mesh.sum(signalled, *ALL_AXES).item() > 0


@dataclass(frozen=True)
class Dataset:
    """The conversations of all paths of a setting."""

    conversations: list[Conversation]
    sizes: list[int]
    """How many of them are of each path."""
    dropped: str
    """How many rows were dropped and why, and what the template does not show; empty if nothing."""
    fingerprints: dict[str, str]
    """Of `prompts` and `labels` of the rows: a position in other rows of the same number means others."""


class SftRun:
    """Model, optimizer and data of one rank. Every method is collective: all ranks call it."""

    def __init__(self, config: SftConfig, mesh: Mesh, device: torch.device, settings: str = ""):
        self.config = config
        self.device = device
        self.settings = settings
        self.mesh = mesh
        self._load_data()
        self.steps_per_epoch = -(-len(self.order) // config.train.batch_size)
        self.total_steps = self.steps_per_epoch * config.train.max_epochs
        if config.train.max_steps is not None:
            self.total_steps = min(self.total_steps, config.train.max_steps)

        self.model = build_policy(config.model, config.fsdp, mesh, device, config.data.max_len)
        self.optimizer = build_optimizer(self.model, config)
        self.scheduler = build_scheduler(self.optimizer, config, self.total_steps)
        self.saving = mesh.saving_group()
        self.writing: Future | None = None
        """The checkpoint that is being written; one at a time."""

    def _load_data(self) -> None:
        """Tokenizer, conversations to train on and their order, and those that are held out."""
        config = self.config
        model = config.model.model_name_or_path
        self.tokenizer = load_tokenizer(model, config.data.chat_template, flag="model.model_name_or_path")

        description = load_config(model, config.data.max_len, "model.model_name_or_path", config.fsdp)
        self.embedding_rows = embedding_rows(description)

        shares = config.data.dataset_probs
        trained = self._dataset(
            config.data.dataset,
            flag="data.dataset",
            split=config.data.dataset_split,
            max_samples=config.data.max_samples,
            each=shares is not None,
        )
        self.conversations = trained.conversations
        self.dropped = trained.dropped
        self.fingerprints = trained.fingerprints
        self.order = EpochOrder(trained.sizes, seed=config.train.seed, shares=shares, flag="data.dataset_probs")

        self.held_out: list[Conversation] = []
        if config.eval.dataset:
            self.held_out = self._dataset(
                config.eval.dataset,
                flag="eval.dataset",
                split=config.eval.split,
            ).conversations

    def _dataset(
        self, paths: str, *, flag: str, split: str, max_samples: int | None = None, each: bool = False
    ) -> Dataset:
        """each: `max_samples` of every path, not of all together."""
        rows = load_rows(paths, flag=flag, split=split, max_samples=max_samples, each=each)
        conversations, report = build_conversations(rows, self.config.data, self.tokenizer, self.embedding_rows)
        notes = [note for note in (report.message(), report.hidden_message()) if note]
        return Dataset(
            conversations,
            sizes=report.left(rows.sizes),
            dropped="\n".join(notes),
            fingerprints=_fingerprints(rows, self.config.data),
        )

    def train(self, termination: Termination) -> None:
        """All steps from the newest checkpoint on. A checkpoint that was begun is completed, whatever happens."""
        with ThreadPoolExecutor(1) as self.writer:
            start = self._resume()
            log = self._open_log(start) if self.mesh.is_writer else None
            self._train(start, log, termination)
            if log:
                log.close()

    def _train(self, start: int, log: RunLog | None, termination: Termination) -> None:
        """All steps after `start`, the checkpoints between them, and the final model."""
        ckpt = self.config.ckpt
        saved = start
        for step in range(start + 1, self.total_steps + 1):
            metrics = self._step(step)
            if self._evaluates(step):
                metrics["eval/loss"] = self.evaluate()
            if log:
                log.step(step, metrics)
            if self.writing is not None and self.writing.done():
                self._settle()

            terminated = termination.anywhere(self.mesh)
            if terminated or (ckpt.save_steps > 0 and step % ckpt.save_steps == 0):
                self._save(step)
                saved = step
            if terminated:
                self._settle()
                if log:
                    print(
                        f"SIGTERM: saved step {step} in {ckpt.checkpoints}; the same command with --ckpt.load_enable "
                        "goes on"
                    )
                return

        if not ckpt.disable_final_save and saved != self.total_steps:
            self._save(self.total_steps)
        self._settle()
        if not ckpt.disable_final_save:
            self._export(ckpt.output_dir)

    def _export(self, path: Path) -> None:
        """The model, which ends its turns as the chat template does."""
        ends = stop_ids(self.tokenizer, (), apply_chat_template=True)
        export_hf(self.model, self.tokenizer, path, self.mesh, end_ids=ends)

    def evaluate(self) -> float:
        """Mean loss per trained token of the held-out conversations, over all data-parallel ranks."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for micro_batch in self._micro_batches(self.held_out):
                # Every rank runs the same number of forwards: FSDP gathers parameters in each of them.
                if micro_batch is None:
                    self.model(dummy_batch(), needed=None)
                    continue
                mask = micro_batch.mask
                logprobs = self.model(micro_batch.batch, needed=mask).logprobs
                loss = -(logprobs * mask).sum().double()
                sums += torch.stack([loss, mask.sum().double()])
        # Collective over the data-parallel axes: every rank.
        loss, tokens = self.mesh.sum(sums, *DATA_AXES).tolist()
        return loss / tokens

    def _open_log(self, start: int) -> RunLog:
        ckpt = self.config.ckpt
        header = f"SFT: {len(self.conversations):,} conversations, {self.total_steps:,} steps on {self.device.type}"
        if self.dropped:
            header = f"{header}\n{self.dropped}"
        resume_step = start if ckpt.load_enable else None
        log = RunLog(ckpt.run_dir, self.config.logger, header, self.total_steps, resume_step)
        if self.settings:
            (ckpt.run_dir / "config.toml").write_text(self.settings, encoding="utf-8")
        return log

    def _step(self, step: int) -> dict[str, float]:
        """Optimizer step number `step`, from 1."""
        began = time.perf_counter()
        chosen = self._batch(step)
        metrics = optimizer_step(
            self.model,
            self.optimizer,
            self.scheduler,
            self._micro_batches(chosen),
            negative_log_likelihood,
            mesh=self.mesh,
            max_norm=self.config.max_norm,
        )
        metrics |= self._over_ranks({name: metrics.get(name, NOTHING) for name in OF_SAMPLES})
        tokens = sum(len(conversation.token_ids) for conversation in chosen)
        metrics["perf/tokens_per_s"] = Metric(tokens, time.perf_counter() - began)
        return values(metrics)

    def _over_ranks(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """The metrics of all data-parallel ranks together: every rank has the same names, none of a maximum."""
        pairs = [[metric.total, metric.count] for metric in metrics.values()]
        # Collective over the data-parallel axes: every rank, once per step.
        sums = self.mesh.sum(torch.tensor(pairs, dtype=torch.float64, device=self.device), *DATA_AXES)
        return {name: Metric(total, count) for name, (total, count) in zip(metrics, sums.tolist(), strict=True)}

    def _batch(self, step: int) -> list[Conversation]:
        """The conversations of a step, from 1."""
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        size = self.config.train.batch_size
        rows = self.order.rows(epoch)[position * size : (position + 1) * size]
        return [self.conversations[row] for row in rows]

    def _micro_batches(self, chosen: Sequence[Conversation]) -> list[SftMicroBatch | None]:
        """The data-parallel rank's share of a step batch; None where only other ranks have a micro-batch left."""
        train = self.config.train
        lengths = [len(conversation.token_ids) for conversation in chosen]
        of_ranks = micro_batches(
            partition(lengths, self.mesh.data_ranks),
            lengths,
            size=train.micro_batch_size,
            max_tokens=train.max_tokens_per_gpu,
            packed=self.config.fsdp.packing_samples,
        )
        weights = token_weights([int(conversation.mask.sum()) for conversation in chosen])

        made: list[SftMicroBatch | None] = []
        for indices in of_ranks[self.mesh.data_rank]:
            if not indices:
                made.append(None)
                continue
            micro_batch = self._micro_batch([chosen[i] for i in indices], [weights[i] for i in indices])
            made.append(micro_batch)
        return made

    def _micro_batch(self, chosen: Sequence[Conversation], weights: Sequence[float]) -> SftMicroBatch:
        """weights: of each trained token, one for each conversation."""
        batch = collate(
            [conversation.token_ids for conversation in chosen],
            packed=self.config.fsdp.packing_samples,
        )
        mask = scatter(batch, [conversation.mask for conversation in chosen])
        of_tokens = []
        for conversation, weight in zip(chosen, weights, strict=True):
            of_tokens.append(np.float32(weight) * conversation.mask)
        return SftMicroBatch(
            batch=batch,
            mask=mask.to(self.device),
            weights=scatter(batch, of_tokens).to(self.device),
        )

    def _evaluates(self, step: int) -> bool:
        """Whether the held-out conversations are measured after this step."""
        if not self.held_out:
            return False
        every = self.config.eval.steps
        if every <= 0:
            every = self.steps_per_epoch
        return step % every == 0 or step == self.total_steps

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a step number to mean the same conversations."""
        train = self.config.train
        return {**self.order.identity, "batch_size": train.batch_size, "seed": train.seed}

    def _resume(self) -> int:
        """Load the newest checkpoint if the settings say so; returns the steps already taken."""
        ckpt = self.config.ckpt
        if not ckpt.load_enable:
            return 0
        path = latest_checkpoint(ckpt.checkpoints)
        if path is None:
            return 0
        extra = read_json(path / "extra.json")
        require_same_run(path, extra["data"], self._identity())
        dataset = f"`data.dataset` (={self.config.data.dataset})"
        require_same_rows(path, extra["rows"], self.fingerprints, dataset)
        load_checkpoint(path, self.model, self.optimizer, self.scheduler, mesh=self.mesh)
        return checkpoint_step(path)

    def _save(self, step: int) -> None:
        """A checkpoint, owned by the writer. With `ckpt.async_save` it is written while training goes on."""
        self._settle()
        ckpt = self.config.ckpt
        tmp = temporary(ckpt.checkpoints, step)
        with self._reporting(tmp):
            if self.mesh.is_writer:
                begin(ckpt.checkpoints, step)
            self.mesh.barrier(*ALL_AXES)  # every rank: nobody writes before the directory is empty
            part = write_part(
                tmp,
                self.model,
                self.optimizer,
                self.scheduler,
                mesh=self.mesh,
                group=self.saving,
                background=ckpt.async_save,
            )
            if ckpt.save_hf:
                self._export(tmp / "hf")
        extra = {"step": step, "data": self._identity(), "rows": self.fingerprints}
        self.writing = self.writer.submit(self._commit, tmp, part, extra)
        if not ckpt.async_save:
            self._settle()

    def _commit(self, tmp: Path, part: Future, extra: Mapping[str, Any]) -> None:
        """Wait for this rank's part, the last of which is the writer's, rank 0; it then finishes the checkpoint."""
        ckpt = self.config.ckpt
        with self._reporting(tmp):
            written(tmp, part)
            if self.mesh.is_writer:
                write_json(tmp / "extra.json", extra)
                commit(tmp)
                prune(ckpt.checkpoints, ckpt.max_num, ckpt.max_mem * 2**30)

    def _reporting(self, tmp: Path) -> AbstractContextManager[None]:
        """Raises `CheckpointError` for what a disk does; the owner, the writer, also removes what was written."""
        if self.mesh.is_writer:
            return removing(tmp)
        return failing(tmp)

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written. Raises what went wrong with it."""
        writing = self.writing
        self.writing = None
        if writing is not None:
            writing.result()


def _fingerprints(rows: Rows, data: SftDataConfig) -> dict[str, str]:
    return {
        "prompts": fingerprint(rows, [data.input_key]),
        "labels": fingerprint(rows, [data.output_key, data.tools_key]),
    }


def negative_log_likelihood(model: nn.Module, micro_batch: SftMicroBatch) -> tuple[Tensor, dict[str, Metric]]:
    """`-sum(weight * log p(token))` over the trained tokens."""
    mask = micro_batch.mask
    output: PolicyOutput = model(micro_batch.batch, needed=mask)
    trained_entropy = (output.entropy.detach() * mask).sum()
    metrics = {"train/entropy": Metric(float(trained_entropy), float(mask.sum()))}
    return -(micro_batch.weights * output.logprobs).sum(), metrics
