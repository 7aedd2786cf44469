"""A third back end in one file. Its models look like nobody else's: a token's state depends on that token alone.

The files have each block in two halves, `block.0.top` and `block.0.bottom`, which are one matrix in memory.
"""

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, PreTrainedConfig, Qwen3Config

from molt.batch.collate import Batch
from molt.models.backends.protocol import CausalLM, Router, ToDisk


class Toy(nn.Module):
    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.config = config
        self.generation_config = GenerationConfig()
        self.tower = nn.Sequential(
            nn.Embedding(config.vocab_size, config.hidden_size),
            *[nn.Linear(config.hidden_size, config.hidden_size, bias=False) for _ in range(config.num_hidden_layers)],
        )
        self.out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


def save_toy(path: Path, table: Tensor, blocks: list[Tensor], out: Tensor) -> Path:
    """table, out: `[V, H]`; blocks: `[H, H]` each. transformers and molt know the configuration as a Qwen3."""
    vocab_size, hidden_size = table.shape
    config = Qwen3Config(vocab_size=vocab_size, hidden_size=hidden_size, num_hidden_layers=len(blocks))
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(path)
    tensors = {"table": table, "out": out}
    for i, block in enumerate(blocks):
        top, bottom = block.chunk(2)
        tensors |= {f"block.{i}.top": top.clone(), f"block.{i}.bottom": bottom.clone()}
    save_file(tensors, path / "model.safetensors")
    return path


def obstacle(config: PreTrainedConfig, attention: str) -> str | None:
    if config.model_type != "qwen3":
        return "toys are Qwen3 by name"
    return None


def build(path: str, config: PreTrainedConfig, attention: str, device: torch.device, dtype: torch.dtype) -> CausalLM:
    with torch.device("meta"):
        return Toy(config).to(dtype)


def random_model(config: PreTrainedConfig, attention: str) -> CausalLM:
    return Toy(config)


def drop_head(causal_lm: CausalLM) -> None:
    causal_lm.out = None


def recompute_layers(causal_lm: CausalLM) -> None:
    for layer in layers(causal_lm):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def layers(causal_lm: CausalLM) -> list[nn.Module]:
    return list(causal_lm.tower)[1:]


def load_weights(causal_lm: CausalLM, path: str, device: torch.device) -> None:
    files = load_file(Path(path) / "model.safetensors")
    tensors = {"tower.0.weight": files["table"], "out.weight": files["out"]}
    for i in range(len(layers(causal_lm))):
        tensors[f"tower.{i + 1}.weight"] = torch.cat([files[f"block.{i}.top"], files[f"block.{i}.bottom"]])
    causal_lm.to_empty(device=device)
    with torch.no_grad():
        for name, param in causal_lm.named_parameters():
            whole = tensors[name].to(param.dtype)
            if isinstance(param, DTensor):
                whole = distribute_tensor(whole, param.device_mesh, param.placements)
            param.copy_(whole)


def decoder(causal_lm: CausalLM) -> nn.Module:
    return causal_lm.tower


def hidden_states(decoder: nn.Module, batch: Batch) -> Tensor:
    return decoder(batch.token_ids)


def head(causal_lm: CausalLM) -> nn.Linear:
    return causal_lm.out


def routers(causal_lm: CausalLM) -> list[Router]:
    return []


def to_disk(causal_lm: CausalLM) -> ToDisk:
    names = {"tower.0.weight": "table", "out.weight": "out"}

    def convert(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        if name in names:
            return [(names[name], tensor)]
        block = int(name.split(".")[1]) - 1
        top, bottom = tensor.chunk(2)
        return [(f"block.{block}.top", top), (f"block.{block}.bottom", bottom)]

    return convert


def aliases(causal_lm: CausalLM) -> set[str]:
    return set()
