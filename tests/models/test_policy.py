"""Packed, padded and single sequences through the whole policy; and what `build_policy` refuses."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from molt.batch.collate import collate, gather
from molt.config import FsdpConfig, ModelConfig
from molt.errors import ConfigError
from molt.models.backends.choice import attention_implementation
from molt.models.build import build_policy
from molt.parallel.mesh import param_dtype, resolve_device
from tests.tiny import save_tiny

CPU = torch.device("cpu")
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def build(path, mesh, gradient_checkpoint="none", **fsdp):
    return build_policy(ModelConfig(str(path), gradient_checkpoint), FsdpConfig(device="cpu", **fsdp), mesh, CPU)


def sequences():
    rng = np.random.default_rng(0)
    return [rng.integers(3, 99, length) for length in (37, 5, 1, 22)]


@pytest.mark.parametrize("attention", ["varlen", "sdpa", "eager"])
def test_packed_equals_padded_equals_single_equals_transformers(tiny, mesh, attention):
    model = build(tiny, mesh, attn_implementation=attention)
    reference = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    batches = {packed: collate(sequences(), packed=packed) for packed in (True, False)}
    with torch.no_grad():
        packed, padded = (gather(batch, model(batch, temperature=0.8)[0]) for batch in batches.values())
        for i, ids in enumerate(map(torch.tensor, sequences())):
            logits = reference(ids[None]).logits[0, :-1] / 0.8
            want = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            single = model(collate([ids], packed=False), temperature=0.8).logprobs
            for got in (packed[i], padded[i], single[0]):
                assert got[0] == 0
                torch.testing.assert_close(got[1:], want, atol=1e-5, rtol=0)


def test_sliding_window_is_respected(mesh, tmp_path):
    config = Qwen3Config(
        vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, use_sliding_window=True, sliding_window=4, max_window_layers=1,
        initializer_range=0.1,
    )  # fmt: skip
    save_tiny(tmp_path, Qwen3ForCausalLM(config).float())
    batch = collate(sequences(), packed=True)
    with torch.no_grad():
        ours = build(tmp_path, mesh)(batch)[0]
        theirs = build(tmp_path, mesh, attn_implementation="eager")(batch)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_gradient_checkpointing_changes_nothing(tiny, mesh):
    grads = []
    for how in ("none", "full"):
        model = build(tiny, mesh, gradient_checkpoint=how)
        model(collate(sequences(), packed=True))[0].sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_dropout_is_off_in_training(mesh, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=99, n_embd=64, n_layer=1, n_head=2, n_positions=64)
    save_tiny(tmp_path, GPT2LMHeadModel(config))
    model = build(tmp_path, mesh, attn_implementation="eager")
    assert model.training
    batch = collate(sequences(), packed=False)
    assert torch.equal(model(batch)[0], model(batch)[0])


def test_masters_stay_float32_when_compute_is_bfloat16(tiny, mesh):
    model = build(tiny, mesh, param_dtype="bf16")
    logprobs = model(collate(sequences(), packed=True)).logprobs
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    exact = build(tiny, mesh)(collate(sequences(), packed=True))[0]
    assert 0 < (logprobs - exact).abs().max() < 0.2


def test_device_and_dtype_defaults():
    assert resolve_device("cpu") == CPU
    assert param_dtype(FsdpConfig(), CPU) == torch.float32
    assert param_dtype(FsdpConfig(param_dtype="bf16"), CPU) == torch.bfloat16


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has the GPU that is asked for")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"fsdp.device` \(=cuda\).*0 are visible.*--fsdp.device cpu"):
        resolve_device("cuda")


def test_unknown_attention_is_refused_by_name():
    assert attention_implementation(FsdpConfig(), CPU) == "varlen"
    with pytest.raises(ConfigError, match=r"\(=te\) on cpu: it needs TransformerEngine.*Use auto, or one of varlen"):
        attention_implementation(FsdpConfig(attn_implementation="te"), CPU)
    with pytest.raises(ConfigError, match="Did you mean 'varlen'"):
        attention_implementation(FsdpConfig(attn_implementation="varlem"), CPU)


def test_a_missing_path_is_refused_before_any_download(mesh, tmp_path):
    with pytest.raises(ConfigError, match="no such directory"):
        build(tmp_path / "nowhere", mesh)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "not a model that can be loaded"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "not a causal LM"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "not a causal LM"),
        (
            {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "logits_scaling": 8.0},
            "scales its logits",
        ),
        ({"model_type": "custom", "auto_map": {"AutoConfig": "code.Config"}}, "not a model that can be loaded"),
    ],
)
def test_what_is_not_a_plain_causal_lm_is_refused(mesh, tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, mesh)


def test_a_context_beyond_the_model_is_refused(tiny, mesh):
    with pytest.raises(
        ConfigError, match=r"data.max_len` \(=4096\) is above the model's max_position_embeddings \(=2048\)"
    ):
        build_policy(ModelConfig(str(tiny)), FsdpConfig(device="cpu"), mesh, CPU, max_len=4096)
