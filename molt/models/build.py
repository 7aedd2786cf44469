"""A Hugging Face causal LM as a sharded `PolicyModel` or `ValueModel`.

Masters are float32; compute runs in `fsdp.param_dtype`. Gradients are *summed* over ranks in float32: the loss of every
rank already carries its weights of the whole step (`algo/reduce.py`), so nothing is averaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from molt.config import FsdpConfig, ModelConfig
from molt.models.backends.choice import attention_implementation, choose_backend
from molt.models.backends.protocol import Backend, CausalLM
from molt.models.description import load_config
from molt.models.forward import PolicyModel, ValueModel
from molt.models.packing import refuse_packing
from molt.parallel.mesh import Mesh, param_dtype

Model = TypeVar("Model", PolicyModel, ValueModel)


@dataclass(frozen=True)
class Prepared:
    """A causal LM that is ready to be sharded, its directory or hub name, and the back end that made it."""

    causal_lm: CausalLM
    path: str
    backend: Backend


def build_policy(
    model_config: ModelConfig,
    fsdp_config: FsdpConfig,
    mesh: Mesh,
    device: torch.device,
    max_len: int | None = None,
) -> PolicyModel:
    """Load, prepare and shard the policy. Every rank of `mesh` calls it; each ends with its shard on `device`.

    Raises `ConfigError` as `load_config`, `attention_implementation` and `refuse_packing` do, and for a model that
    cannot be exported.
    """
    prepared = _prepare(model_config, fsdp_config, device, max_len, dtype=torch.float32, flag="model_name_or_path")
    model = PolicyModel(
        prepared.causal_lm,
        prepared.backend,
        compute_dtype=param_dtype(fsdp_config, device),
        to_disk=prepared.backend.to_disk(prepared.causal_lm),
    )
    return _place(model.train(), prepared, mesh, device)


def build_critic(
    model_config: ModelConfig,
    fsdp_config: FsdpConfig,
    mesh: Mesh,
    device: torch.device,
    max_len: int | None = None,
) -> ValueModel:
    """The value model on the decoder of a causal LM, trained as the policy is; as `build_policy`, but never exported.

    Its head is drawn from torch's generator, which every rank must have seeded alike.
    """
    prepared = _prepare(
        model_config, fsdp_config, device, max_len, dtype=torch.float32, flag="critic.model_name_or_path"
    )
    prepared.backend.drop_head(prepared.causal_lm)
    model = ValueModel(prepared.causal_lm, prepared.backend, compute_dtype=param_dtype(fsdp_config, device))
    return _place(model.train(), prepared, mesh, device)


def build_frozen(
    path: str, fsdp_config: FsdpConfig, mesh: Mesh, device: torch.device, max_len: int | None = None
) -> PolicyModel:
    """A model that only runs under `torch.no_grad()`: no gradients, weights held in the compute dtype.

    Every rank of `mesh` calls it; each ends with its shard. Raises `ConfigError` as `build_policy` does, except for
    exports.
    """
    dtype = param_dtype(fsdp_config, device)
    model_config = ModelConfig(path, gradient_checkpoint="none")
    prepared = _prepare(model_config, fsdp_config, device, max_len, dtype=dtype, flag="ref.model_name_or_path")
    model = PolicyModel(prepared.causal_lm, prepared.backend, compute_dtype=dtype)
    model.requires_grad_(False)
    return _place(model.eval(), prepared, mesh, device)


def _prepare(
    model_config: ModelConfig,
    fsdp_config: FsdpConfig,
    device: torch.device,
    max_len: int | None,
    *,
    dtype: torch.dtype,
    flag: str,
) -> Prepared:
    """The causal LM with weights of `dtype`, without dropout, its layers recomputed if the settings say so."""
    path = model_config.model_name_or_path
    attention = attention_implementation(fsdp_config, device)
    config = load_config(path, max_len, flag, fsdp_config)
    refuse_packing(config, fsdp_config, device, f"`{flag}` (={path})")
    backend = choose_backend(fsdp_config, config, device, attention)
    causal_lm = backend.build(path, config, attention, device, dtype)

    _disable_dropout(causal_lm)
    if model_config.gradient_checkpoint == "full":
        backend.recompute_layers(causal_lm)
    return Prepared(causal_lm, path, backend)


def _place(model: Model, prepared: Prepared, mesh: Mesh, device: torch.device) -> Model:
    """Shard the model around the causal LM, read the weights that are not there yet, and move it to the device."""
    # One rank without mixed precision has nothing to shard or cast; FSDP would cost a tiny model 12-32 %. With it a
    # frozen model is wrapped too: FSDP also casts what layers are called with, and a reference computes as the policy.
    if mesh.size > 1 or model.compute_dtype != torch.float32:
        shard(model, prepared.backend.layers(prepared.causal_lm), mesh)
    prepared.backend.load_weights(prepared.causal_lm, prepared.path, device)
    return model.to(device)


def _disable_dropout(model: nn.Module) -> None:
    """The engine has none; with it, trainer and engine would disagree by design."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            _disable_attention_dropout(module)


def _disable_attention_dropout(attention: Any) -> None:
    attention.attention_dropout = 0.0


def shard(model: PolicyModel | ValueModel, layers: Sequence[nn.Module], mesh: Mesh) -> None:
    """FSDP2 over each decoder layer, a scalar head and the root; gradients are summed over `mesh.fsdp` in float32."""
    of_compute_dtype = MixedPrecisionPolicy(param_dtype=model.compute_dtype, reduce_dtype=torch.float32)
    of_float32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)

    # The root comes last: it holds what no other module holds.
    sharded = []
    for layer in layers:
        sharded.append(fully_shard(layer, mesh=mesh.fsdp, mp_policy=of_compute_dtype))
    if isinstance(model, ValueModel):
        sharded.append(fully_shard(model.head, mesh=mesh.fsdp, mp_policy=of_float32))
    sharded.append(fully_shard(model, mesh=mesh.fsdp, mp_policy=of_compute_dtype))

    # Neither setting is recursive, and gloo needs the first for the second.
    for module in sharded:
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    model.register_forward_hook(_reshard_without_backward)


def _reshard_without_backward(model: nn.Module, args: tuple[Any, ...], output: object) -> None:
    # FSDP keeps the root unsharded until its backward. Without one, `parameters()` would go on to yield whole
    # tensors that the optimizer does not know and that FSDP frees later: a checkpoint of them crashed.
    if not torch.is_grad_enabled() and isinstance(model, FSDPModule):
        model.reshard()
