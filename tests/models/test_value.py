"""The critic's values and gradients, and the frozen model, on one rank and two and on both back ends."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from transformers import AutoModel

from molt.batch.collate import collate, gather
from molt.config import AdamConfig, FsdpConfig, ModelConfig, OptimizerConfig
from molt.errors import ConfigError
from molt.models.build import build_critic, build_frozen, build_policy
from molt.train.checkpoint import begin, commit, load_checkpoint, write_part
from molt.train.optimizer import build_optimizer, build_scheduler
from molt.train.step import accumulate, dummy_batch, optimizer_step
from tests.tiny import save_tiny, tiny_moe
from tests.train.ranks import CPU, run_ranks, whole

BACKENDS = ("transformers", "automodel")[: 1 + (find_spec("nemo_automodel") is not None)]
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("value")
    save_tiny(directory / "tied")
    save_tiny(directory / "moe", tiny_moe("deepseek_v3"))
    return directory


def sequences():
    rng = np.random.default_rng(0)
    return [torch.tensor(rng.integers(3, 99, length)) for length in (37, 5, 1, 22)]


def critic(path, mesh, gradient_checkpoint="none", **fsdp):
    torch.manual_seed(3)
    return build_critic(ModelConfig(str(path), gradient_checkpoint), FsdpConfig(device="cpu", **fsdp), mesh, CPU)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["tied", "moe"])
def test_values_are_those_of_the_state_before_each_token(directory, mesh, name, backend):
    model = critic(directory / name, mesh, backend=backend)
    decoder = AutoModel.from_pretrained(directory / name, dtype=torch.float32)
    weight = model.head.weight[0].detach()
    with torch.no_grad():
        outputs = {packed: gather(b := collate(sequences(), packed=packed), model(b)) for packed in (True, False)}
        for i, ids in enumerate(sequences()):
            states = decoder(ids[None]).last_hidden_state[0]
            want = torch.tensor([0.0, *(float(state @ weight) for state in states[:-1])])
            for got in (outputs[True][i], outputs[False][i], model(collate([ids], packed=True))[0]):
                assert got.dtype == torch.float32
                torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
        needed = torch.zeros(4, 37, dtype=torch.bool)
        needed[0, 4] = True
        some = model(collate(sequences(), packed=False), needed=needed)
    torch.testing.assert_close(some[0, 4], outputs[False][0][4])
    assert some.count_nonzero() == 1


def test_the_head_is_drawn_from_the_model_s_range_and_the_seed(directory, mesh):
    first = critic(directory / "tied", mesh)
    weight = first.head.weight  # 64 of N(0, 1/8): the mean is within 4 * 1/64, the deviation within 4 * 0.011
    assert weight.shape == (1, 64) and abs(weight.mean()) < 0.07 and abs(weight.std() - 0.125) < 0.045
    assert torch.equal(weight, critic(directory / "tied", mesh, backend=BACKENDS[-1]).head.weight)
    again = build_critic(ModelConfig(str(directory / "tied")), FsdpConfig(device="cpu"), mesh, CPU)
    assert not torch.equal(weight, again.head.weight)
    assert not any("lm_head" in name for name, _ in first.named_parameters())


@pytest.mark.parametrize("name", ["tied", "moe"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dummy_reaches_every_parameter(directory, mesh, name, backend):
    model = critic(directory / name, mesh, "full", backend=backend)
    (0.0 * model(dummy_batch()).sum()).backward()
    assert all(p.requires_grad and p.grad is not None and not p.grad.any() for p in model.parameters())


def test_the_head_is_float32_when_compute_is_bfloat16(directory, mesh):
    model = critic(directory / "tied", mesh, param_dtype="bf16")
    seen = []
    model.head.register_forward_hook(lambda head, args, out: seen.append((args[0], head.weight.dtype, out.dtype)))
    batch = collate(sequences(), packed=True)
    values = model(batch)
    states, *dtypes = seen[0]
    assert dtypes == [torch.float32] * 2 and torch.equal(states, states.bfloat16().float())  # the decoder's is bfloat16
    values.square().sum().backward()
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    exact = critic(directory / "tied", mesh)(batch)
    assert 0 < (values - exact).abs().max() < 0.2


def test_errors_name_the_critic_s_flag(mesh, tmp_path):
    with pytest.raises(ConfigError, match=r"critic.model_name_or_path` .*no such directory"):
        critic(tmp_path / "nowhere", mesh)
    with pytest.raises(ConfigError, match=r"ref.model_name_or_path` .*no such directory"):
        build_frozen(str(tmp_path / "nowhere"), FsdpConfig(device="cpu"), mesh, CPU)


def squares(model, batch):
    return (model(batch) - 1).square().sum(), {}


def on_ranks(mesh, directory, packed, target):
    """By (model, back end): gradients and values of the critic as built, and log-probs of the frozen model. And
    whether a critic is again what it was when a checkpoint is loaded after one more step."""
    results = {}
    mine = sequences()[mesh.rank :: mesh.size]
    # One of the two ranks has a micro-batch less than the other.
    layout = [mine] if mesh.size == 1 else [[mine[:1], mine[1:]], [mine, None]][mesh.rank]
    batches = [some and collate(some, packed=packed) for some in layout]
    settings = OptimizerConfig(adam=AdamConfig(lr=1e-2))
    for name in ("tied", "moe"):
        for backend in BACKENDS:
            model = critic(directory / name, mesh, "full", backend=backend)
            head = whole(model.head.weight)
            optimizer = build_optimizer(model, settings)
            scheduler = build_scheduler(optimizer, settings, 10)
            accumulate(model, optimizer, batches, squares)
            grads = {name: whole(p.grad) for name, p in model.named_parameters()}
            frozen = build_frozen(str(directory / name), FsdpConfig(device="cpu", backend=backend), mesh, CPU)
            with torch.no_grad():
                logprobs = gather(b := collate(sequences(), packed=packed), frozen(b)[0])
            results[name, backend] = head, grads, logprobs
    optimizer_step(model, optimizer, scheduler, batches, squares, mesh=mesh, max_norm=0.0)
    if mesh.rank == 0:
        begin(target, 1)
    torch.distributed.barrier()
    group = mesh.saving_group()
    write_part(target / "step_000001.tmp", model, optimizer, scheduler, mesh=mesh, group=group, background=False)
    saved = {n: whole(p) for n, p in model.named_parameters()}
    optimizer_step(model, optimizer, scheduler, batches, squares, mesh=mesh, max_norm=0.0)
    moved = not torch.equal(saved["head.weight"], whole(model.head.weight))
    if mesh.rank == 0:
        commit(target / "step_000001.tmp")
    torch.distributed.barrier()
    load_checkpoint(target / "step_000001", model, optimizer, scheduler, mesh=mesh)
    results["restored"] = moved and all(torch.equal(saved[n], whole(p)) for n, p in model.named_parameters())
    return results


@pytest.mark.processes
def test_two_ranks_compute_what_one_does(directory, mesh, tmp_path):
    alone = on_ranks(mesh, directory, True, tmp_path / "alone")
    for both in run_ranks(on_ranks, 2, tmp_path / "ranks", directory, False, tmp_path / "saved", limit_s=120):
        assert alone.pop("restored", True) and both.pop("restored")
        for case, (head, grads, logprobs) in both.items():
            assert torch.equal(head, alone[case][0])
            for name, expected in alone[case][1].items():
                assert torch.linalg.norm(grads[name] - expected) <= 1e-4 * torch.linalg.norm(expected), (case, name)
            for got, want in zip(logprobs, alone[case][2], strict=True):
                torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_frozen_model_computes_what_the_policy_does(directory, mesh, backend, dtype):
    for name in ("tied", "moe"):
        settings = FsdpConfig(device="cpu", backend=backend, param_dtype=dtype)
        policy = build_policy(ModelConfig(str(directory / name), "full"), settings, mesh, CPU)
        frozen = build_frozen(str(directory / name), settings, mesh, CPU)
        assert {p.dtype for p in frozen.parameters()} == {frozen.compute_dtype}
        assert frozen.compute_dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        assert not any(p.requires_grad for p in frozen.parameters())
        batch = collate(sequences(), packed=True)
        with torch.no_grad():
            assert torch.equal(frozen(batch, temperature=0.8)[0], policy(batch, temperature=0.8)[0])
