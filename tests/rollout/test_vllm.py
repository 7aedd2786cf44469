"""The real engine: what `FakeEngine` fakes, and what only vLLM can get wrong."""

import asyncio
import json
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from molt.columns import candidate_columns
from molt.config import VllmConfig
from molt.driver import drive_evaluation
from molt.errors import PublicationError, StructureError
from molt.publish.proof import check_transport, compare_probe
from molt.publish.publication import Publisher
from molt.publish.transfer import ShmSender
from molt.report.metrics import values
from molt.rollout.engine_group import EngineGroup
from molt.rollout.engine_worker import EngineSettings, RolloutEngineWorker, Sampling
from molt.rollout.evaluate import answer, score
from molt.rollout.runner_pool import RunnerPool
from molt.rollout.runner_worker import RunnerWorker
from molt.spec import held_out_prompts, resolve_evaluation
from molt.train.policy_worker import RayEngineClient
from molt.worker_settings import runner_settings
from tests.runs import settings, write_prompts
from tests.tiny import END_ID

pytestmark = [pytest.mark.vllm, pytest.mark.ray]


def engine_on(model_dir: str, max_model_len: int = 256, **settings):
    engine = RolloutEngineWorker.options(num_cpus=0).remote(
        EngineSettings(model_dir, "float32", max_model_len, "cpu", **settings)
    )
    ray.get(engine.start.remote(), timeout=300)
    ray.get(engine.resume.remote(), timeout=60)
    return engine


@pytest.fixture(scope="module")
def engine(ray_session, model_dir):
    engine = engine_on(model_dir)
    yield engine
    ray.kill(engine)


@pytest.fixture(scope="module")
def client(engine):
    client = RayEngineClient([engine], timeout_s=60)
    client.init_weight_transfer_engine({})
    return client


def prompts(count: int, length: int = 20) -> list[list[int]]:
    return np.random.default_rng(0).integers(3, 90, (count, length)).tolist()


def sampling(seed: int = 0, **other) -> Sampling:
    return Sampling(**{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 24, "seed": seed,
                       "stop_token_ids": (END_ID,)} | other)  # fmt: skip


def tokens_later(engine, count: int, name: str) -> ray.ObjectRef:
    """Done when the running requests have `count` more tokens, whatever the speed: a batch decodes in step."""
    return engine.generate.remote(name, prompts(1)[0], sampling(5, max_tokens=count, stop_token_ids=()))


def reference_logprobs(model, ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """Plain transformers: entry t is log p(token t | before), 0 for the first."""
    with torch.no_grad():
        values = (model(torch.tensor([ids])).logits[0, :-1].double() / temperature).log_softmax(-1)
    return np.concatenate([[0.0], values.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()])


def changed(model_dir: str, scale: float = 1.05) -> dict[str, torch.Tensor]:
    """Other weights under the same names."""
    return {name: tensor * scale for name, tensor in load_file(f"{model_dir}/model.safetensors").items()}


class Trainer:
    """The policy as a publication sees it: one transformers model in this process."""

    def __init__(self, model_dir: str, client):
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.sender = ShmSender(client, self.tensors, is_writer=False)  # a writer would initialise the engine again
        self.sender.is_writer = True

    def tensors(self):
        tied = {"lm_head.weight"}
        return [(name, p.detach().clone()) for name, p in self.model.named_parameters() if name not in tied]

    async def connect(self, engines):
        pass

    async def send_weights(self):
        return await asyncio.to_thread(self.sender.send)

    async def probe(self, sequences):
        return [reference_logprobs(self.model, ids) for ids in sequences]


class Engines(EngineGroup):
    """Nobody watches them, so none is replaced: what goes wrong is raised."""

    async def examine(self, suspects=()):
        return False


def publisher(model_dir: str, engine, client) -> Publisher:
    return Publisher(
        Trainer(model_dir, client), Engines([engine], timeout_s=60), prompts(4, 40),
        bound=1e-4, use_max=True, workers_per_engine=1,
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_sampled_distribution(engine, model_dir, temperature):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    calls = [engine.generate.remote(f"a{temperature}{i}", ids, sampling(i, temperature=temperature))
             for i, ids in enumerate(prompts(8))]  # fmt: skip
    for turn in ray.get(calls, timeout=60):
        ids = [*turn.prompt_ids.tolist(), *turn.token_ids.tolist()]
        expected = reference_logprobs(model, ids, temperature)[len(turn.prompt_ids) :]
        assert np.abs(turn.logprobs - expected).max() < 1e-4
        assert turn.finish_reason == ("stop" if turn.token_ids[-1] == END_ID else "length")


def test_candidates_are_the_likeliest_tokens_and_their_log_probs(engine, model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    columns = candidate_columns(5)
    request = replace(sampling(3), temperature=0.8, candidates=5)
    turn = ray.get(engine.generate.remote("candidates", prompts(1)[0], request), timeout=60)
    ids = torch.tensor([*turn.prompt_ids.tolist(), *turn.token_ids.tolist()])
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
    logp = (logits / 0.8).log_softmax(-1)[len(turn.prompt_ids) - 1 : -1]
    expected = logp.topk(5)
    assert turn.sampled.values(columns.ids).tolist() == expected.indices.tolist()
    assert np.abs(turn.sampled.values(columns.logprobs) - expected.values.numpy()).max() < 1e-4
    alone = ray.get(engine.generate.remote("alone", prompts(1)[0], replace(request, candidates=0)), timeout=60)
    assert alone.token_ids.tolist() == turn.token_ids.tolist() and alone.sampled.further == ()


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others(engine):
    ids = prompts(1)[0]
    first, again, other = ray.get(
        [engine.generate.remote(f"s{i}", ids, sampling(seed)) for i, seed in enumerate((7, 7, 8))], timeout=60
    )
    assert np.array_equal(first.token_ids, again.token_ids)
    assert not np.array_equal(first.token_ids, other.token_ids)


def test_a_structure_is_enforced_and_a_bad_one_is_the_requests_doing(engine, model_dir):
    """A random model says anything; with a structure it says one of two words, or a JSON object of one number."""
    decode = AutoTokenizer.from_pretrained(model_dir).decode

    def say(name: str, structure: dict) -> str:
        request = sampling(7, max_tokens=60, structure=structure)
        turn = ray.get(engine.generate.remote(name, prompts(1)[0], request), timeout=60)
        return decode(turn.token_ids, skip_special_tokens=True)

    assert say("choice", {"choice": ["yes", "no"]}) in ("yes", "no")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert json.loads(say("json", {"json": schema}))["a"] in range(10)
    with pytest.raises(StructureError, match="cannot be enforced"):
        say("bad", {"regex": "("})
    assert ray.get(engine.alive.remote(), timeout=60)


def test_more_new_prompts_than_one_step_takes(engine):
    """128 x 150 tokens: no prefill may be split, since vLLM on a CPU cannot rewind a seeded generator."""
    calls = [
        engine.generate.remote(f"many{i}", ids, sampling(i, max_tokens=4)) for i, ids in enumerate(prompts(128, 150))
    ]
    assert all(len(turn.token_ids) for turn in ray.get(calls, timeout=120))


def test_logprobs_equal_a_plain_forward(engine, model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    for ids, scored in zip(prompts(3, 30), ray.get(engine.logprobs.remote(prompts(3, 30)), timeout=60), strict=True):
        assert np.abs(scored - reference_logprobs(model, ids)).max() < 1e-4


def test_cancelling_a_call_frees_the_engine(engine, client):
    """A pause waits for running requests: it is short only if the cancelled ones are gone."""

    def seconds_until_idle(name: str, cancel: bool) -> float:
        calls = [
            engine.generate.remote(f"{name}{i}", ids, sampling(i, max_tokens=200, stop_token_ids=()))
            for i, ids in enumerate(prompts(48))
        ]
        ray.get(tokens_later(engine, 20, f"clock_{name}"), timeout=60)
        for call in calls if cancel else ():
            ray.cancel(call)
        started = time.monotonic()
        client.start_weight_update()
        seconds = time.monotonic() - started
        client.finish_weight_update()
        ray.get(engine.commit.remote(0), timeout=60)
        ray.get(engine.resume.remote(), timeout=60)
        return seconds

    assert seconds_until_idle("cancelled", cancel=True) < seconds_until_idle("running", cancel=False) / 2


def test_an_update_changes_the_probe_and_running_requests_finish_on_the_old_version(engine, client, model_dir):
    publish = publisher(model_dir, engine, client)

    async def scenario():
        await publish.publish(1)
        before = await publish.engines.logprobs(publish.probe, [0])
        running = engine.generate.remote("running", prompts(1)[0], sampling(3, max_tokens=200, stop_token_ids=()))
        await tokens_later(engine, 20, "clock")
        publish.policy.model.load_state_dict(changed(model_dir), strict=False)
        metrics = await publish.publish(2)
        after = await publish.engines.logprobs(publish.probe, [0])
        turn = await running
        later = await engine.generate.remote("later", prompts(1)[0], sampling(3))
        return before, after, metrics, turn, later

    before, after, metrics, turn, later = asyncio.run(scenario())
    assert metrics["mismatch/abs_max"].total <= 1e-4
    assert compare_probe(before[0], after[0])["mismatch/abs_max"].total > 1e-2
    assert set(turn.versions) == {1}
    assert set(later.versions) == {2}


@pytest.mark.parametrize("partial_kv", ["recompute", "keep"])
def test_a_rollout_that_straddles_two_publications(ray_session, model_dir, endless_model_dir, partial_kv):
    """Its tokens carry three versions, and each log-prob is that of its version's weights: of a full forward under
    them, unless the KV of the weights before was kept."""
    # Long, since the engine generates on while a busy machine proves the first publication.
    engine = engine_on(endless_model_dir, 1024, partial_rollouts=True, vllm=VllmConfig(partial_kv=partial_kv))
    try:
        client = RayEngineClient([engine], timeout_s=60)
        client.init_weight_transfer_engine({})
        publish = publisher(model_dir, engine, client)
        models = [AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval() for _ in range(3)]
        for model, scale in zip(models[1:], (1.05, 0.95), strict=True):
            model.load_state_dict(changed(model_dir, scale), strict=False)

        async def scenario():
            asked = sampling(3, max_tokens=900, stop_token_ids=())
            running = [engine.generate.remote(f"r{i}", ids, asked) for i, ids in enumerate(prompts(2))]
            for version in (1, 2):
                await tokens_later(engine, 20, f"clock{version}")
                publish.policy.model = models[version]
                await publish.publish(version)
            return await asyncio.gather(*running), await engine.generate.remote("new", prompts(2)[0], sampling(3))

        turns, new = asyncio.run(scenario())
        for turn in turns:
            assert (np.diff(turn.versions) >= 0).all()
            assert len(turn.versions) == 900 and set(turn.versions) == {0, 1, 2}
            ids = [*turn.prompt_ids.tolist(), *turn.token_ids.tolist()]
            for version in range(3) if partial_kv == "recompute" else (0,):
                there = turn.versions == version
                expected = reference_logprobs(models[version], ids)[len(turn.prompt_ids) :]
                assert np.abs(turn.logprobs - expected)[there].max() < 1e-4
            old = reference_logprobs(models[1], ids)[len(turn.prompt_ids) :]
            assert np.abs(turn.logprobs - old)[turn.versions == 2].max() > 1e-2
        # A new request with the prompt of a running one reuses nothing that was computed under other weights.
        ids = [*new.prompt_ids.tolist(), *new.token_ids.tolist()]
        assert set(new.versions) == {2}
        assert np.abs(new.logprobs - reference_logprobs(models[2], ids)[len(new.prompt_ids) :]).max() < 1e-4
    finally:
        ray.kill(engine)


def test_a_publication_that_was_interrupted_is_begun_again(engine, client, model_dir):
    publish = publisher(model_dir, engine, client)
    client.start_weight_update()
    publish.policy.model.load_state_dict(changed(model_dir), strict=False)
    assert asyncio.run(publish.publish(7))["mismatch/abs_max"].total <= 1e-4


def test_weights_that_are_not_on_the_engines_machine(engine, client, model_dir):
    client.start_weight_update()
    with pytest.raises(PublicationError, match="/dev/shm/elsewhere is not on this engine's machine"):
        client.update_weights({"path": "/dev/shm/elsewhere"})
    publish = publisher(model_dir, engine, client)
    assert asyncio.run(publish.publish(8))["mismatch/abs_max"].total <= 1e-4


class Corrupts:
    """A client that damages the file on its way."""

    def __init__(self, client, damage):
        self.client, self.damage = client, damage

    def __getattr__(self, name):
        return getattr(self.client, name)

    def update_weights(self, info):
        tensors = load_file(info["path"])
        self.damage(tensors)
        save_file(tensors, info["path"])
        self.client.update_weights(info)


VICTIM = "model.layers.1.mlp.down_proj.weight"


def drop(tensors):
    del tensors[VICTIM]


def alter(tensors):
    tensors[VICTIM][3, 5] += 1e-3


def rename(tensors):
    tensors["model.layers.1.mlp.down_prj.weight"] = tensors.pop(VICTIM)


@pytest.mark.parametrize("damage", [drop, alter, rename])
def test_a_tensor_damaged_in_transit_is_named_and_a_repeated_publication_heals(engine, client, model_dir, damage):
    publish = publisher(model_dir, engine, client)
    publish.policy.sender.client = Corrupts(client, damage)
    with pytest.raises(PublicationError, match=r"down_pr"):
        asyncio.run(publish.publish(5))
    publish.policy.sender.client = client
    assert asyncio.run(publish.publish(6))["mismatch/abs_max"].total <= 1e-4


def test_received_but_not_in_use_is_caught_by_the_probe(ray_session, model_dir):
    """The tied head stays packed with the old embedding: every checksum is right, the log-probs are not."""
    engine = engine_on(
        model_dir, weight_transfer="shm_leaves_head_packed", extension="tests.vllm_faults.FaultyExtension"
    )
    try:
        client = RayEngineClient([engine], timeout_s=60)
        client.init_weight_transfer_engine({})
        publish = publisher(model_dir, engine, client)
        publish.policy.model.load_state_dict(changed(model_dir), strict=False)
        sent = asyncio.run(publish.policy.send_weights())
        check_transport(sent, asyncio.run(publish.engines.commit(1, [0])), 1)
        with pytest.raises(PublicationError, match="received, not in use"):
            asyncio.run(publish.publish(2))
    finally:
        ray.kill(engine)


def test_an_evaluation_from_disk_is_that_of_the_published_weights(engine, client, model_dir, tmp_path):
    """`molt eval` of an exported model against the evaluation inside the run that published it."""
    disk = tmp_path / "changed"
    shutil.copytree(model_dir, disk)
    save_file(changed(model_dir), disk / "model.safetensors", metadata={"format": "pt"})
    dataset = write_prompts(tmp_path / "p.jsonl", 12)
    config = settings(str(disk), tmp_path / "out", "", "--eval.dataset", dataset, "--eval.eval_only")

    async def inside(config):
        publish = publisher(model_dir, engine, client)
        publish.policy.model.load_state_dict(changed(model_dir), strict=False)
        await publish.publish(9)
        runner = runner_settings(config)
        runners = RunnerPool(lambda name: RunnerWorker.options(num_cpus=0).remote(runner, [engine], name), 1,
                             deadline_s=60, attempts=1)  # fmt: skip
        prompts = held_out_prompts(config).prompts
        greedy = replace(config.eval, temperature=0.0, n_samples_per_prompt=2)
        return [await answer(prompts, runners, config.rollout, how) for how in (config.eval, greedy)]

    sampled, greedy = asyncio.run(inside(config))
    from_disk, _ = asyncio.run(drive_evaluation(resolve_evaluation(config)))
    metrics = values(score(sampled))
    assert metrics["eval/p/failures"] == 0 and metrics["eval/p/pass1"] > 0
    assert values(score(from_disk)) == metrics
    assert all(len({rollout.outcome.score for rollout in rollouts}) == 1 for rollouts in greedy["p"])
    assert values(score(greedy))["eval/p/failures"] == 0


def test_a_deterministic_engine_gives_a_request_the_same_bits_whatever_else_runs(ray_session, model_dir):
    """The CPU kernels round by the size of the batch, so a plain engine does not."""
    deterministic = engine_on(model_dir, deterministic=True)
    try:
        ids, *others = prompts(17)
        (alone,) = ray.get([deterministic.generate.remote("alone", ids, sampling(7))], timeout=60)
        crowd = [deterministic.generate.remote(f"c{i}", other, sampling(i)) for i, other in enumerate(others)]
        among = ray.get([deterministic.generate.remote("among", ids, sampling(7)), *crowd], timeout=120)[0]
        assert among.token_ids.tolist() == alone.token_ids.tolist() and len(alone.token_ids) > 1
        assert among.logprobs.tobytes() == alone.logprobs.tobytes()
    finally:
        ray.kill(deterministic)
