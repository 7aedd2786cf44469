"""Packed samples are computed as each alone, or packing is refused by name before any weight is read."""

import importlib.util
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel

from molt.batch.collate import collate, gather
from molt.config import FsdpConfig, ModelConfig
from molt.errors import ConfigError
from molt.models.backends.choice import load_backend
from molt.models.build import build_critic, build_frozen, build_policy
from molt.models.packing import packing_fault, refuse_packing, try_packing
from molt.models.shrink import shrunken
from tests.models.backends import toy
from tests.models.families import MODELS
from tests.tiny import tiny_qwen3

ROOT = Path(__file__).resolve().parent.parent.parent
CPU = torch.device("cpu")
TRANSFORMERS = load_backend("transformers")  # registers varlen
SIZES = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 2, "initializer_range": 0.125, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip
MIXERS = {
    "qwen3_next": (
        {
            "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"],
        },
        "varlen",
        "Qwen3NextGatedDeltaNet (layers.0.linear_attn) of Qwen3NextForCausalLM",
    ),
    "jamba": (
        {
            "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 2,
            "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
        },
        "varlen",
        "JambaMambaMixer (layers.0.mamba) of JambaForCausalLM",
    ),
    "lfm2": (
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        "varlen",
        "Lfm2ShortConv (layers.0.conv) of Lfm2ForCausalLM",
    ),
    "gpt_oss": (
        {
            "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "eager",
        "GptOssAttention (layers.0.self_attn) of GptOssForCausalLM",
    ),
}  # fmt: skip
"""By model type: sizes, the attention that trains it, and where its samples meet."""
torch.set_num_threads(1)


def description(model_type: str, path) -> str:
    """A directory with the configuration of a tiny model, and no weights."""
    settings, *_ = MIXERS[model_type]
    config = AutoConfig.for_model(model_type, **{**SIZES, **settings})
    config.architectures = [MIXERS[model_type][2].rpartition(" ")[2]]
    config.save_pretrained(path)
    return str(path)


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(8, 90, (length,), generator=generator) for length in (7, 12)]


def states(decoder, packed: bool) -> list[torch.Tensor]:
    batch = collate(samples(), packed=packed)
    with torch.no_grad():
        return gather(batch, TRANSFORMERS.hidden_states(decoder, batch))


@pytest.mark.parametrize("model_type", MIXERS)
def test_packing_is_refused_where_it_is_wrong_and_padding_is_exact(tmp_path, model_type):
    path = description(model_type, tmp_path)
    _, attention, where = MIXERS[model_type]
    config = AutoConfig.from_pretrained(path)
    torch.manual_seed(0)
    model = AutoModel.from_config(config, attn_implementation=attention).float().eval()
    with torch.no_grad():
        alone = [model(ids[None]).last_hidden_state[0] for ids in samples()]
    # transformers itself: the first sample of a pack is right, and the second is not.
    packed = states(model, packed=True)
    torch.testing.assert_close(packed[0], alone[0], atol=1e-5, rtol=0)
    assert (packed[1] - alone[1]).abs().max() > 1e-2
    for ours, theirs in zip(states(model, packed=False), alone, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)

    fsdp = FsdpConfig(device="cpu", attn_implementation=attention, packing_samples=True)
    with pytest.raises(ConfigError) as raised:
        refuse_packing(config, fsdp, CPU, "`actor.model_name_or_path` (=x)")
    message = str(raised.value)
    assert message.startswith("`fsdp.packing_samples` (=True): `actor.model_name_or_path` (=x): ")
    assert where in message and "log-probs" in message
    assert "Leave out --fsdp.packing_samples: padded samples are exact with every model." in message
    refuse_packing(config, FsdpConfig(device="cpu", attn_implementation=attention), CPU, "padded")


@pytest.mark.parametrize("attention", ["varlen", "sdpa", "eager"])
@pytest.mark.parametrize("model", MODELS)
def test_attention_alone_keeps_samples_apart(model, attention):
    config = MODELS[model]().config
    assert packing_fault(TRANSFORMERS, config, attention) is None


@pytest.mark.skipif(find_spec("nemo_automodel") is None, reason="nemo-automodel is not installed")
@pytest.mark.filterwarnings("ignore:Qwen2ForCausalLM is deprecated")
@pytest.mark.parametrize("model", MODELS)
def test_the_classes_of_automodel_are_tried_themselves(model, monkeypatch):
    automodel = load_backend("automodel")
    config = MODELS[model]().config
    config.architectures = [type(MODELS[model]()).__name__]
    assert try_packing(automodel, config, "varlen").is_exact

    def forget_borders(batch):
        return {"input_ids": batch.token_ids, "position_ids": batch.position_ids}

    monkeypatch.setattr("molt.models.backends.automodel.decoder_inputs", forget_borders)
    fault = packing_fault(automodel, config, "varlen")
    assert fault is not None and "mixes the samples of a pack" in fault


@pytest.mark.parametrize("model_type", ["jamba", "gpt_oss"])
def test_policy_critic_and_reference_are_refused_before_weights_are_read(mesh, tmp_path, model_type):
    path = description(model_type, tmp_path)  # without weights
    _, attention, where = MIXERS[model_type]
    fsdp = FsdpConfig(device="cpu", attn_implementation=attention, packing_samples=True)
    for build, flag in ((build_policy, "model_name_or_path"), (build_critic, "critic.model_name_or_path")):
        with pytest.raises(ConfigError) as raised:
            build(ModelConfig(path), fsdp, mesh, CPU)
        assert f"`{flag}` (={path})" in str(raised.value) and where in str(raised.value)
    with pytest.raises(ConfigError) as raised:
        build_frozen(path, fsdp, mesh, CPU)
    assert f"`ref.model_name_or_path` (={path})" in str(raised.value) and where in str(raised.value)

    padded = FsdpConfig(device="cpu", attn_implementation=attention)
    with pytest.raises(OSError, match=r"model\.safetensors|no file named"):
        build_policy(ModelConfig(path), padded, mesh, CPU)


class Summing(torch.nn.Module):
    """Adds to a token the mean of all before it in its row: what it mixes it does not know as samples."""

    def forward(self, states):
        return states + states.cumsum(1)


class Shifting(torch.nn.Module):
    """Moves what a row of several samples holds: wrong, but the same whatever the first sample is."""

    def forward(self, states):
        return states + float(len(states) == 1)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (torch.nn.Identity(), None),
        (Summing(), "Summing (2) of Toy mixes the samples of a pack"),
        (Shifting(), "Toy computes packed samples otherwise than padded ones"),
    ],
)
def test_a_layer_of_another_back_end_is_found(monkeypatch, layer, said):
    def random_model(config, attention):
        model = toy.Toy(config)
        model.tower.insert(2, layer)
        return model

    monkeypatch.setattr(toy, "random_model", random_model)
    fault = packing_fault(toy, tiny_qwen3().config, "varlen")
    assert (fault is None) == (said is None)
    assert said is None or fault.startswith(said)


def test_a_class_that_cannot_be_tried_is_not_packed(monkeypatch):
    def random_model(config, attention):
        raise RuntimeError("no such kernel\non this machine")

    monkeypatch.setattr(toy, "random_model", random_model)
    fault = packing_fault(toy, tiny_qwen3().config, "varlen")
    assert fault.startswith("no small qwen3 model could be tried (RuntimeError: no such kernel), so nobody knows")


def test_a_nan_is_not_exact(monkeypatch):
    def hidden_states(decoder, batch):
        return decoder(batch.token_ids) * float("nan")

    monkeypatch.setattr(toy, "hidden_states", hidden_states)
    assert packing_fault(toy, tiny_qwen3().config, "varlen") is not None


def test_a_trial_leaves_random_numbers_and_the_configuration_as_they_are():
    config = tiny_qwen3().config
    before = config.to_json_string(use_diff=False)
    torch.manual_seed(7)
    expected = torch.randn(3)
    torch.manual_seed(7)
    assert packing_fault(TRANSFORMERS, config, "varlen") is None
    assert torch.equal(torch.randn(3), expected)
    assert config.to_json_string(use_diff=False) == before


def test_large_models_become_thin_and_keep_their_layers():
    config = AutoConfig.for_model("qwen3_next")  # 80 billion parameters
    thin = next(shrunken(config))
    # 2048 / 32 = 64; 16 heads / 32 is at least one; 512 experts become 4.
    assert (thin.hidden_size, thin.num_attention_heads, thin.num_experts, thin.num_experts_per_tok) == (64, 1, 4, 2)
    assert thin.vocab_size == 128
    assert thin.layer_types == config.layer_types and len(thin.layer_types) == 48
    small = json.loads(tiny_qwen3().config.to_json_string())
    assert json.loads(next(shrunken(tiny_qwen3().config)).to_json_string()) == small


def packing_table():
    path = ROOT / "scripts" / "packing_table.py"
    spec = importlib.util.spec_from_file_location("packing_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
@pytest.mark.parametrize(
    "model_type",
    ["llama", "gemma2", "gpt_oss", "qwen3_moe", "qwen3_next", "mamba2", "jamba", "lfm2", "bloom", "reformer"],
)
def test_the_table_of_the_docs_says_what_a_trial_says(model_type):
    rows = [line.split(" | ") for line in (ROOT / "docs" / "packing.md").read_text().splitlines()]
    (row,) = [row for row in rows if row[0] == f"| {model_type}" and "(automodel)" not in row[1]]
    written = [cell.strip(" |") for cell in row[2:]]
    verdicts = [cell.partition(":")[0] for cell in written]
    if verdicts[1] == '"':
        verdicts = [verdicts[0]] * 3
    assert verdicts == [outcome.verdict for outcome in packing_table().try_row(model_type, "transformers")]
