"""`FakeEngine`: the `Engine` Protocol without vLLM, for fast tests of everything around it.

It holds a transformers model, really loads what is published and really samples from it, so log-probs
and versions are true. A sample is a function of (weights, prompt, seed), as vLLM's is. What it fakes is
speed, batching and packing; those are tested against vLLM in tests/rollout/test_vllm.py.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
import ray
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from molt.columns import candidate_columns, token_columns
from molt.errors import EngineError
from molt.publish.proof import Receipt, checksum, combine
from molt.rollout.engine_worker import EngineSettings, Sampling
from molt.types import Media, Turn


class FakeEngine:
    """See the module docstring. One turn is computed in one go, so an update never meets a running one."""

    def __init__(self, settings: EngineSettings):
        self.settings = settings
        self.version = "0"
        self.received: dict[str, int] = {}
        self.joined = False
        self.open = asyncio.Event()

    async def start(self) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(self.settings.model, dtype=torch.float32).eval()

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: Sampling, media: Sequence[Media] = ()
    ) -> Turn:
        if not self.joined:
            raise EngineError("the engine has no weights of the trainer yet")
        await self.open.wait()
        await asyncio.sleep(0.001)
        generator = torch.Generator().manual_seed(sampling.seed)
        ids, logprobs, candidates = list(prompt_ids), [], []
        while len(logprobs) < sampling.max_tokens and (not logprobs or ids[-1] not in sampling.stop_token_ids):
            values = self._logprobs(ids, sampling.temperature or 1.0)[-1]
            greedy = sampling.temperature == 0
            ids.append(int(values.argmax() if greedy else torch.multinomial(values.exp(), 1, generator=generator)))
            logprobs.append(float(values[ids[-1]]))
            candidates.append(values.topk(sampling.candidates))
        n = len(logprobs)
        sampled = token_columns(ids[-n:], np.full(n, int(self.version)), logprobs)
        if sampling.candidates:
            columns = candidate_columns(sampling.candidates)
            sampled = sampled.with_column(columns.ids, [top.indices.tolist() for top in candidates])
            sampled = sampled.with_column(columns.logprobs, [top.values.tolist() for top in candidates])
        return Turn(
            prompt_ids=np.asarray(prompt_ids, np.int32),
            sampled=sampled,
            finish_reason="stop" if ids[-1] in sampling.stop_token_ids else "length",
        )

    async def complete(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> list[int]:
        turn = await self.generate(request_id, prompt_ids, sampling)
        return [*prompt_ids, *turn.token_ids.tolist()]

    async def logprobs(self, sequences: list[list[int]]) -> list[np.ndarray]:
        scored = []
        for ids in sequences:
            values = self._logprobs(ids, 1.0)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            scored.append(np.concatenate([[0.0], values.numpy()]).astype(np.float32))
        return scored

    async def init_weight_transfer_engine(self, info: dict) -> None:
        pass

    async def start_weight_update(self) -> None:
        self.open.clear()

    async def update_weights(self, info: dict) -> None:
        tensors = load_file(info["path"])
        self.received = {name: checksum(tensor) for name, tensor in tensors.items()}
        self.model.load_state_dict(tensors, strict=False)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass

    async def commit(self, version: int) -> list[Receipt]:
        self.version = str(version)
        held = {name: checksum(parameter) for name, parameter in self.model.named_parameters()}
        received, self.received = self.received, {}
        return [Receipt(self.version, received, combine(held))]

    async def resume(self) -> None:
        self.joined = True
        self.open.set()

    async def alive(self) -> bool:
        return self.joined

    @torch.no_grad()
    def _logprobs(self, ids: list[int], temperature: float) -> torch.Tensor:
        return (self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float() / temperature).log_softmax(
            -1
        )


FakeEngineWorker = ray.remote(max_concurrency=16384)(FakeEngine)
