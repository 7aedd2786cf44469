"""Bandwidth of a publication over that of `memcpy`: 104M parameters in float32, from a trainer to one vLLM engine.

    python benchmarks/publish.py [--rounds 5]

The trainer is a policy rank in this process, the engine a real one in its own; weights go the way of every run
(`Publisher`, checksums, digest and probe included), and change before each publication. Between two of them one thread
copies the same tensors once (`memcpy`). The parts of a publication, in seconds of the clock:

    gather     whole tensors under their Hugging Face names
    transfer   checksums as sent, and the copy into shared memory
    pause      the engine holds new requests and opens the update
    load       the engine reads and checksums what arrived, and packs it
    proof      digest of what the engine holds, comparison, and the probe scored by both sides

Last line: `publish ratio=BANDWIDTH/MEMCPY`. 1 would be a bare copy; a publication reads and writes every byte several
times (shared memory, the engine's copy, its packed layout) and checks it on both sides.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import ray
import torch
from _common import spread

from molt.cluster import start_ray
from molt.config import ActorConfig, PromptDataConfig, RLConfig
from molt.parallel.mesh import init_distributed, single_threaded_on_cpu
from molt.parallel.shape import MeshShape
from molt.publish.publication import Publisher
from molt.publish.transfer import ShmSender
from molt.rollout.engine_group import EngineGroup
from molt.rollout.engine_worker import RolloutEngineWorker
from molt.run import PROBE_SEQUENCES, PROBE_TOKENS
from molt.spec import process_spec
from molt.train.policy import Policy
from molt.train.policy_worker import RayEngineClient
from molt.worker_settings import engine_settings, policy_settings
from tests.tiny import save_tiny, tiny_qwen3

WORDS = 28_000
TIMEOUT_S = 300.0
PARTS = ("gather", "transfer", "pause", "load", "proof")


class Parts:
    """Seconds of each part since `start`."""

    def start(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.began = self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] += now - self.last
        self.last = now

    @property
    def total(self) -> float:
        return self.last - self.began


class TimedClient(RayEngineClient):
    """Calls the engine, and notes when it answered."""

    parts = Parts()

    def start_weight_update(self) -> None:
        self.parts.lap("transfer")
        super().start_weight_update()
        self.parts.lap("pause")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        super().finish_weight_update(weight_version)
        self.parts.lap("load")


class Trainer:
    """One policy rank, as a publication sees it."""

    def __init__(self, policy: Policy, client: TimedClient):
        self.policy = policy
        self.parts = client.parts
        self.sender = ShmSender(client, self.tensors, is_writer=True)

    def tensors(self):
        yield from self.policy.named_tensors()
        self.parts.lap("gather")

    def change(self) -> None:
        """As an optimizer step would, by a little."""
        with torch.no_grad():
            for parameter in self.policy.model.parameters():
                parameter.mul_(1.001)

    async def send_weights(self) -> dict[str, int]:
        return await asyncio.to_thread(self.sender.send)

    async def connect(self, engines: Sequence[int]) -> None:
        """There is one, which it met when it was built."""

    async def probe(self, sequences: list[list[int]]) -> list[np.ndarray]:
        return self.policy.probe(sequences)


def memcpy(tensors: list[torch.Tensor], copies: list[torch.Tensor]) -> float:
    """Seconds of one copy of all tensors into memory that exists."""
    began = time.perf_counter()
    for tensor, copy in zip(tensors, copies, strict=True):
        copy.copy_(tensor)
    return time.perf_counter() - began


async def measure(config: RLConfig, rounds: int) -> None:
    spec = process_spec(config, [], total_batches=1)
    engine = RolloutEngineWorker.options(num_cpus=0).remote(engine_settings(spec))
    started = engine.start.remote()
    mesh = init_distributed(0, MeshShape(), "", 0, spec.device)
    policy = Policy(policy_settings(spec), mesh)
    await started
    trainer = Trainer(policy, TimedClient([engine], TIMEOUT_S))
    probe = np.random.default_rng(0).integers(3, WORDS, (PROBE_SEQUENCES, 32 + PROBE_TOKENS)).tolist()
    publisher = Publisher(
        trainer, EngineGroup([engine], timeout_s=TIMEOUT_S), probe, bound=1e-3, use_max=True, workers_per_engine=1
    )
    tensors = [tensor for _, tensor in policy.named_tensors()]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    size = sum(tensor.nbytes for tensor in tensors)
    memcpy(tensors, copies)  # touches every page
    copied = []
    published = []
    parts = []
    for version in range(rounds + 1):
        trainer.parts.start()
        await publisher.publish(version)
        trainer.parts.lap("proof")
        if version > 0:  # the first one warms up
            published.append(trainer.parts.total)
            parts.append(trainer.parts.seconds)
            copied.append(memcpy(tensors, copies))
        trainer.change()
    print(
        f"{size / 4e6:,.0f}M parameters, {size / 2**20:,.0f} MiB; medians of {rounds} rounds (smallest to largest), s"
    )
    for part in PARTS:
        print(f"  {part:9} {spread([seconds[part] for seconds in parts], 3)}")
    print(f"publication {spread(published, 3)}; memcpy {spread(copied, 3)}")
    ratios = [copy / publication for copy, publication in zip(copied, published, strict=True)]
    bare = [copy / (total - split["proof"]) for copy, total, split in zip(copied, published, parts, strict=True)]
    print(f"ratio without the proof {spread(bare, 3)}")
    print(f"ratio {spread(ratios, 3)}; {size / 2**30 / statistics.median(published):.2f} GiB/s")
    print(f"publish ratio={statistics.median(ratios):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        model = tiny_qwen3(vocab_size=WORDS, layers=12, hidden=768, heads=12, kv_heads=4, head_dim=64)
        save_tiny(Path(name), model)
        config = RLConfig(
            actor=ActorConfig(model_name_or_path=name, gradient_checkpoint="none"), data=PromptDataConfig(max_len=256)
        )
        single_threaded_on_cpu(torch.device("cpu"))
        start_ray(config)
        try:
            asyncio.run(measure(config, rounds))
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
