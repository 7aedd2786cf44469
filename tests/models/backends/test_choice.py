"""Which back end is taken; and that a third one is a file and a row."""

from math import log
from typing import get_args, get_type_hints

import pytest
import torch
from safetensors.torch import load_file

from molt.batch.collate import collate
from molt.config import FsdpConfig, ModelConfig
from molt.errors import ConfigError
from molt.models.backends import choice
from molt.models.backends.choice import BACKENDS, Row, load_backend
from molt.models.build import build_critic, build_frozen, build_policy
from molt.publish.gather import named_full_tensors
from molt.train.checkpoint import export_hf
from tests.models.backends import toy
from tests.tiny import char_tokenizer, save_tiny, tiny_moe

CPU = torch.device("cpu")
FSDP = FsdpConfig(device="cpu", backend="toy")
torch.set_num_threads(1)


def load_toy():
    return toy


@pytest.fixture
def toy_row(monkeypatch):
    """The row, first in the table."""
    monkeypatch.setattr(choice, "BACKENDS", {"toy": Row(load_toy, auto_on=("cpu",)), **BACKENDS})


@pytest.fixture
def directory(tmp_path):
    """After token 1 the state is (0, ln 2), after the others (0, 0)."""
    table = torch.tensor([[0, 0], [log(2), 0], [0, 0]])
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    return toy.save_toy(tmp_path / "toy", table, [swap], out=torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))


def test_the_choices_of_the_flag_are_the_rows_and_auto():
    assert set(get_args(get_type_hints(FsdpConfig)["backend"])) == {*BACKENDS, "auto"}


def test_another_name_is_refused():
    with pytest.raises(ConfigError, match=r"`fsdp.backend` \(=automodle\): .* Use auto, or one of.*Did you mean 'auto"):
        load_backend("automodle")


def test_a_third_back_end_trains_publishes_and_exports(toy_row, directory, mesh, tmp_path):
    batch = collate([torch.tensor([1, 1, 0]), torch.tensor([2, 1])], packed=True)
    for gradient_checkpoint in ("none", "full"):
        policy = build_policy(ModelConfig(str(directory), gradient_checkpoint), FSDP, mesh, CPU)
        assert isinstance(policy.causal_lm, toy.Toy)
        logprobs, entropies = policy(batch)[:2]
        # Logits (0, ln 2, 0) after token 1: probabilities 1/4, 1/2, 1/4. All are 1/3 after token 2.
        torch.testing.assert_close(logprobs, torch.tensor([[0, -log(2), -log(4), 0, -log(3)]]))
        torch.testing.assert_close(entropies, torch.tensor([[0, 1.5 * log(2), 1.5 * log(2), 0, log(3)]]))
        logprobs[0, 1].backward()
        # d log p(1) = (1 - 1/2) d logit 1, and the state before it is (0, ln 2).
        torch.testing.assert_close(policy.causal_lm.out.weight.grad[1], torch.tensor([0, log(2) / 2]))

    sent = dict(named_full_tensors(policy, torch.float32))
    files = load_file(directory / "model.safetensors")
    assert sent.keys() == files.keys() == {"table", "out", "block.0.top", "block.0.bottom"}
    assert all(torch.equal(sent[name], files[name]) for name in files)

    with torch.no_grad():
        policy.causal_lm.tower[0].weight[2] = torch.tensor([log(2), 0])
    export_hf(policy, char_tokenizer(), tmp_path / "export", mesh)
    again = build_policy(ModelConfig(str(tmp_path / "export")), FSDP, mesh, CPU)
    torch.testing.assert_close(again(batch)[0][0, 4], torch.tensor(-log(2)))


def test_a_third_back_end_is_a_critic_and_a_reference_too(toy_row, directory, mesh):
    batch = collate([torch.tensor([1, 1, 0])], packed=False)
    critic = build_critic(ModelConfig(str(directory)), FSDP, mesh, CPU)
    assert {name for name, _ in critic.named_parameters()} == {"decoder.0.weight", "decoder.1.weight", "head.weight"}
    with torch.no_grad():
        critic.head.weight.copy_(torch.tensor([[5.0, 3.0]]))
    # 5 * 0 + 3 ln 2, the value of the state after token 1.
    torch.testing.assert_close(critic(batch), torch.tensor([[0, 3 * log(2), 3 * log(2)]]))

    # Sharded and in bfloat16: ln 2 is rounded to 8 bits.
    bf16 = FsdpConfig(device="cpu", backend="toy", param_dtype="bf16")
    reference = build_frozen(str(directory), bf16, mesh, CPU)
    assert {param.dtype for param in reference.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        torch.testing.assert_close(reference(batch)[0], torch.tensor([[0, -log(2), -log(4)]]), atol=2e-3, rtol=0)


def test_auto_takes_the_first_row_without_an_obstacle(toy_row, directory, mesh, tmp_path):
    auto = FsdpConfig(device="cpu")
    assert isinstance(build_policy(ModelConfig(str(directory)), auto, mesh, CPU).causal_lm, toy.Toy)

    moe = str(save_tiny(tmp_path / "moe", tiny_moe()))
    assert type(build_policy(ModelConfig(moe), auto, mesh, CPU).causal_lm).__name__ == "Qwen3MoeForCausalLM"
    with pytest.raises(ConfigError, match=r"`fsdp.backend` \(=toy\): .*: toys are Qwen3 by name, so another model"):
        build_policy(ModelConfig(moe), FSDP, mesh, CPU)


def test_auto_says_why_nothing_trains_a_model(monkeypatch, mesh, tmp_path):
    monkeypatch.setattr(choice, "BACKENDS", {"toy": Row(load_toy, auto_on=("cpu",))})
    moe = str(save_tiny(tmp_path / "moe", tiny_moe()))
    with pytest.raises(ConfigError, match=r"\(=auto\): nothing trains this model on cpu \(toy: toys are Qwen3 by name"):
        build_policy(ModelConfig(moe), FsdpConfig(device="cpu"), mesh, CPU)


def test_auto_leaves_automodel_to_gpus():
    assert [name for name, row in BACKENDS.items() if "cpu" in row.auto_on] == ["transformers"]
    assert [name for name, row in BACKENDS.items() if "cuda" in row.auto_on] == ["automodel", "transformers"]
