"""A mixture of experts between trainer and engine: fused in one's memory, an expert a tensor on its way."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist

from molt.batch.collate import collate
from molt.parallel.mesh import init_distributed
from molt.parallel.shape import MeshShape
from molt.publish.gather import named_full_tensors
from molt.publish.proof import compare_probe
from molt.publish.publication import Publisher
from molt.publish.transfer import ShmSender
from molt.rollout.engine_group import EngineGroup
from molt.rollout.engine_worker import EngineSettings, RolloutEngineWorker, Sampling
from molt.train.checkpoint import export_hf
from molt.train.policy_worker import RayEngineClient
from molt.train.sft import negative_log_likelihood
from molt.train.step import optimizer_step
from tests.tiny import char_tokenizer, save_tiny, tiny_moe
from tests.train.ranks import CPU, micro_batches_of, step_batch, trainer

pytestmark = [pytest.mark.vllm, pytest.mark.ray]


@pytest.fixture(scope="module")
def mesh():
    yield init_distributed(0, MeshShape(), "", 0, CPU)
    dist.destroy_process_group()


class OneRank:
    """The policy as a publication sees it, in this process."""

    def __init__(self, path, mesh):
        self.mesh, (self.model, *self.rest) = mesh, trainer(path, mesh)

    def step(self, seed: int) -> None:
        batches = micro_batches_of(self.mesh, step_batch(seed), 4, True, None)
        optimizer_step(self.model, *self.rest, batches, negative_log_likelihood, mesh=self.mesh, max_norm=1.0)

    def tensors(self):
        return named_full_tensors(self.model, torch.float32)

    async def connect(self, engines):
        """There is one, which it met when it was built."""

    async def send_weights(self):
        return await asyncio.to_thread(self.sender.send)

    async def probe(self, sequences):
        with torch.no_grad():
            return [self.model(collate([np.array(ids)], packed=False))[0][0].numpy() for ids in sequences]


def test_trainer_and_engine_agree_on_an_exported_model_and_after_an_update(ray_session, mesh, tmp_path):
    policy = OneRank(save_tiny(tmp_path / "start", tiny_moe("qwen3_moe")), mesh)
    policy.step(0)
    export_hf(policy.model, char_tokenizer(), tmp_path / "export", mesh)
    engine = RolloutEngineWorker.options(num_cpus=0).remote(
        EngineSettings(str(tmp_path / "export"), "float32", 256, "cpu")
    )
    try:
        ray.get(engine.start.remote(), timeout=300)
        ray.get(engine.resume.remote(), timeout=60)
        prompt = list(range(3, 23))
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=64, seed=0, stop_token_ids=())
        calls = [engine.generate.remote(f"exported{i}", prompt, replace(sampling, seed=i)) for i in range(4)]
        turns = ray.get(calls, timeout=60)
        assert sum(len(turn.token_ids) for turn in turns) >= 64
        ours = asyncio.run(policy.probe([[*prompt, *turn.token_ids.tolist()] for turn in turns]))
        for turn, logprobs in zip(turns, ours, strict=True):
            assert np.abs(turn.logprobs - logprobs[len(prompt) :]).max() < 1e-4

        client = RayEngineClient([engine], timeout_s=60)
        policy.sender = ShmSender(client, policy.tensors, is_writer=True)
        engines = EngineGroup([engine], timeout_s=60)
        probe = [ids.tolist() for ids in step_batch(seed=7)[0]]
        publisher = Publisher(policy, engines, probe, bound=1e-4, use_max=True, workers_per_engine=1)
        (before,) = asyncio.run(engines.logprobs(probe, [0]))
        policy.step(1)
        metrics = asyncio.run(publisher.publish(1))
        (after,) = asyncio.run(engines.logprobs(probe, [0]))
        assert metrics["mismatch/abs_max"].total <= 1e-4
        assert compare_probe(before, after)["mismatch/abs_max"].total > 1e-2
    finally:
        ray.kill(engine)
