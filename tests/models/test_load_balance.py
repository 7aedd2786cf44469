"""The load balance of experts against plain loops, whatever shares the micro-batch, the rank or the back end."""

from importlib.util import find_spec
from math import log

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from molt.batch.collate import collate
from molt.config import FsdpConfig, ModelConfig
from molt.errors import ConfigError
from molt.models.build import build_policy
from molt.models.load_balance import Route, balance_loss, refuse_balance
from tests.tiny import save_tiny, tiny_moe, tiny_qwen3
from tests.train.ranks import CPU, run_ranks, whole

KINDS = ("qwen3_moe", "deepseek_v3", "glm4_moe")
LENGTHS = (37, 5, 1, 22)
BACKENDS = ("transformers", "automodel")[: 1 + (find_spec("nemo_automodel") is not None)]
torch.set_num_threads(1)


def sequences():
    rng = np.random.default_rng(0)
    return [torch.tensor(rng.integers(3, 99, length)) for length in LENGTHS]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("balance")
    for kind in KINDS:
        model = tiny_moe(kind)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:  # so that the choice is not that of the scores
                buffer.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
        save_tiny(directory / kind, model)
    return directory


def test_by_hand():
    # Two experts, one chosen. First sequence: P = (1/4, 3/4), and expert 1 twice, f = (0, 2): 2 * 3/4.
    # Second: P = (1/2, 1/2) from (3/4, 1/4) and (1/4, 3/4), each chosen once, f = (1, 1): 1. The other layer: 1 and 1.
    high = log(3)
    logits = torch.tensor([[0, high], [0, high], [high, 0], [0, high]])
    layers = [
        Route(logits, torch.tensor([[1], [1], [0], [1]])),
        Route(logits * 0, torch.tensor([[0], [1], [0], [1]])),
    ]
    got = balance_loss(layers, "qwen3_moe", collate([np.zeros(2), np.zeros(2)], packed=True))
    torch.testing.assert_close(got, torch.tensor([(1.5 + 1) / 2, 1.0]))
    # Sigmoid scores are divided by their sum: 1/2 and 3/4 become 2/5 and 3/5. f = (0, 2): 2 * 3/5; then as above.
    got = balance_loss(layers[:1], "glm4_moe", collate([np.zeros(2), np.zeros(2)], packed=True))
    torch.testing.assert_close(got, torch.tensor([1.2, 1.0]))


def reference(model, kind, token_ids):
    """Plain loops in float64 over what each router of transformers' model sees of one sequence; gradients flow."""
    seen = []
    blocks = [m for m in model.modules() if hasattr(m, "gate") and hasattr(m, "experts")]
    hooks = [b.register_forward_hook(lambda block, args, out: seen.append((block.gate, args[0][0]))) for b in blocks]
    model(token_ids[None])
    for hook in hooks:
        hook.remove()
    layers = []
    for gate, hidden in seen:
        scores, experts, chosen, total = [], len(gate.weight), [0] * len(gate.weight), 0.0
        for state in hidden.double():
            logits = gate.weight.double() @ state
            raw = torch.sigmoid(logits) if kind != "qwen3_moe" else logits.exp()
            scores.append(raw / raw.sum())
            bias = gate.e_score_correction_bias.double() if kind != "qwen3_moe" else torch.zeros(experts)
            for expert in sorted(range(experts), key=lambda i: -(raw[i] + bias[i]).item())[:2]:
                chosen[expert] += 1
        for expert in range(experts):
            frequency = experts / (2 * len(hidden)) * chosen[expert]
            total = total + frequency * sum(score[expert] for score in scores) / len(hidden)
        layers.append(total)
    assert len(layers) == (2 if kind == "qwen3_moe" else 1)
    return sum(layers) / len(layers)


def build(path, mesh, backend="transformers", gradient_checkpoint="none"):
    return build_policy(
        ModelConfig(str(path), gradient_checkpoint), FsdpConfig(device="cpu", backend=backend), mesh, CPU
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_each_sequence_alone(directory, mesh, kind, backend):
    model = build(directory / kind, mesh, backend)
    exact = AutoModelForCausalLM.from_pretrained(directory / kind, dtype=torch.float32)
    with torch.no_grad():
        want = torch.stack([reference(exact, kind, ids) for ids in sequences()]).float()
        for packed in (True, False):
            output = model(collate(sequences(), packed=packed), balance=True)
            balance = output.balance
            assert balance.dtype == torch.float32
            torch.testing.assert_close(balance, want, atol=1e-5, rtol=0)
            # Asking for it changes nothing else, and leaves no hook behind.
            plain = model(collate(sequences(), packed=packed))
            assert torch.equal(output.logprobs, plain.logprobs) and torch.equal(output.entropy, plain.entropy)
        alone = [model(collate([ids], packed=True), balance=True).balance for ids in sequences()]
    torch.testing.assert_close(torch.cat(alone), want, atol=1e-5, rtol=0)
    assert ((want - 1).abs() > 1e-3).all()  # not balanced


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_reference(directory, mesh, kind):
    exact = AutoModelForCausalLM.from_pretrained(directory / kind, dtype=torch.float32)
    sum(reference(exact, kind, ids) for ids in sequences()).backward()
    want = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    for gradient_checkpoint in ("none", "full"):
        model = build(directory / kind, mesh, gradient_checkpoint=gradient_checkpoint)
        model(collate(sequences(), packed=True), balance=True).balance.sum().backward()
        got = {name: p.grad for name, p in model.causal_lm.named_parameters() if p.grad is not None}
        assert any("gate.weight" in name for name in got) and "model.embed_tokens.weight" in got
        for name, grad in want.items():
            torch.testing.assert_close(got[name], grad, atol=1e-6, rtol=1e-4)


def gradients(mesh, cases):
    """Of `sum(log-probs) / 100 + sum(balance)` over all sequences, which ranks share: dicts by (kind, back end)."""
    results = {}
    for path, backend, packed in cases:
        model = build(path, mesh, backend, "none" if path.name == "deepseek_v3" else "full")
        mine = sequences()[mesh.rank :: mesh.size]
        for batch in [mine] if mesh.size == 1 else [mine[:1], mine[1:]]:
            output = model(collate(batch, packed=packed), balance=True)
            (output.logprobs.sum() / 100 + output.balance.sum()).backward()
        results[path.name, backend] = {name: whole(p.grad) for name, p in model.named_parameters()}
    return results


@pytest.mark.processes
def test_two_ranks_have_the_gradient_of_one(directory, mesh, tmp_path):
    cases = [(directory / kind, backend) for kind in KINDS for backend in BACKENDS]
    alone = gradients(mesh, [(*case, True) for case in cases])
    for rank in run_ranks(gradients, 2, tmp_path, [(*case, False) for case in cases[:-1]], limit_s=120):
        for case, grads in rank.items():
            for name, grad in grads.items():
                expected = alone[case][name]
                assert torch.linalg.norm(grad - expected) <= 1e-4 * torch.linalg.norm(expected), (case, name)
    for kind in KINDS:  # both back ends: experts are laid out in other ways, the norms are the same
        norms = [sum(g.double().square().sum() for g in alone[kind, backend].values()) for backend in BACKENDS]
        torch.testing.assert_close(norms[0], norms[-1], rtol=1e-4, atol=0)


def test_a_model_without_experts_is_refused(mesh, tmp_path):
    save_tiny(tmp_path / "dense")
    with pytest.raises(ConfigError, match=r"`balance` \(=True\): Qwen3ForCausalLM has no experts.*Use 0, or a model"):
        build(tmp_path / "dense", mesh)(collate(sequences(), packed=True), balance=True)
    with pytest.raises(
        ConfigError, match=r"`actor.aux_loss_coef` \(=0.1\): qwen3 has no experts.* qwen3_moe, deepseek_v3"
    ):
        refuse_balance(tiny_qwen3().config, "`actor.aux_loss_coef` (=0.1)")
    refuse_balance(tiny_moe().config, "`actor.aux_loss_coef` (=0.1)")
    save_tiny(tmp_path / "all_dense", tiny_moe(mlp_only_layers=[0, 1]))  # which its type does not say
    with pytest.raises(ConfigError, match="has no experts"):
        build(tmp_path / "all_dense", mesh)(collate(sequences(), packed=True), balance=True)
