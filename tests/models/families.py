"""A tiny model of every family that both back ends train."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.tiny import tiny_moe, tiny_qwen3

SIZES = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "initializer_range": 0.125, "max_position_embeddings": 2048, "bos_token_id": None,
    "eos_token_id": 2, "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
MODELS = {
    "tied": lambda: tiny_qwen3(tie=True),
    "untied": lambda: tiny_qwen3(tie=False),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3_moe": lambda: tiny_moe("qwen3_moe").bfloat16(),  # the files' dtype is not that of the masters
    "deepseek_v3": lambda: router_bias(tiny_moe("deepseek_v3", rope_parameters=YARN)),
    "glm4_moe": lambda: router_bias(tiny_moe("glm4_moe")),
}


def router_bias(model):
    """Not 0, so that a back end that forgets it routes otherwise."""
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
    return model
