"""Whether a model keeps packed samples apart: tried on a thin model of its real class, before any weight is read.

Attention is told where the samples of a pack start (`cu_seqlens`, positions that restart). Layers that mix tokens in
another way (a convolution, a state space, linear attention) mostly are not, and let a sample see those before it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from molt.batch.collate import Batch, collate, gather
from molt.config import FsdpConfig
from molt.errors import ConfigError
from molt.models.backends.choice import choose_backend
from molt.models.backends.protocol import Backend, CausalLM, ModuleValues
from molt.models.shrink import shrunken

LENGTHS = (9, 11)
"""Tokens of the two samples. No multiples of the windows and chunks that `shrunken` leaves."""
TOLERANCE = 1e-5
"""Largest difference of hidden states, in units of their root mean square, that is rounding."""
MOST_ROUNDING = 1e-3
"""What differs by more is not rounding."""
MASK_ATTENTIONS = ("eager", "sdpa")
"""The others learn from `cu_seqlens` where samples start, as varlen does, which runs on every machine."""
NOISE = 0.02
"""Standard deviation of what is added to the initial weights: some are 0, and would hide what they multiply."""


class Trial(NamedTuple):
    """What a pack of two samples showed. Differences are in units of the root mean square of the states."""

    class_name: str
    leak: float
    """How far the second sample's states moved when another first sample was before it."""
    difference: float
    """How far the states of the pack are from those of the same samples padded."""
    leaking_module: str
    """`CLASS (NAME)` of the innermost module in which the samples meet; empty without a leak."""

    @property
    def is_exact(self) -> bool:
        return self.leak <= TOLERANCE and self.difference <= TOLERANCE  # False for NaN too


def refuse_packing(config: PreTrainedConfig, fsdp: FsdpConfig, device: torch.device, setting: str) -> None:
    """Raise `ConfigError` if `fsdp` packs samples, and the model would not keep them apart or cannot be tried.

    setting: the flag, and the value, that named the model. Takes about a second if samples are packed.
    """
    if not fsdp.packing_samples:
        return
    attention = "varlen"
    if fsdp.attn_implementation in MASK_ATTENTIONS:
        attention = fsdp.attn_implementation
    backend = choose_backend(fsdp, config, device, attention)
    fault = packing_fault(backend, config, attention)
    if fault is not None:
        raise ConfigError(
            f"`fsdp.packing_samples` (=True): {setting}: {fault}. "
            "Leave out --fsdp.packing_samples: padded samples are exact with every model."
        )


def packing_fault(backend: Backend, config: PreTrainedConfig, attention: str) -> str | None:
    """What packing would compute wrongly, or why that cannot be known; or None.

    attention: of transformers' registry, one that runs on a CPU.
    """
    try:
        trial = try_packing(backend, config, attention)
    except Exception as error:  # of a foreign class with sizes that it was not made for
        reason = str(error).splitlines() or [""]
        return (
            f"no small {config.model_type} model could be tried ({type(error).__name__}: {reason[0]}), so nobody knows "
            "whether packed samples would see each other"
        )
    if trial.is_exact:
        return None
    if trial.leaking_module:
        return (
            f"{trial.leaking_module} of {trial.class_name} mixes the samples of a pack, whichever borders it is told, "
            "so log-probs and gradients of a sample would depend on those before it"
        )
    return (
        f"{trial.class_name} computes packed samples otherwise than padded ones (by {trial.difference:.0e}), so "
        "log-probs and gradients would be wrong"
    )


def try_packing(backend: Backend, config: PreTrainedConfig, attention: str) -> Trial:
    """Run a thin model of the class of `config` over a pack of two random samples, on the host.

    Neither torch's random numbers nor what it compiles are changed. Raises what the class raises if it can be built,
    or run, with none of the sizes that `shrunken` offers.
    """
    # Nothing is compiled for a model that is thrown away, and a back end may forbid it for good.
    with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"), torch.no_grad():
        torch.manual_seed(0)
        failure: Exception | None = None
        for thin in shrunken(config):
            try:
                return _exact_trial(backend, backend.random_model(thin, attention))
            except Exception as error:  # sizes that do not fit each other raise what they like
                failure = failure or error
    assert failure is not None
    raise failure


def _exact_trial(backend: Backend, causal_lm: CausalLM) -> Trial:
    """In float32; in float64 if what differs may be rounding that many layers have amplified."""
    trial = _trial(backend, causal_lm)
    if not trial.is_exact and max(trial.leak, trial.difference) < MOST_ROUNDING:
        with suppress(Exception):  # a class that computes in float32 whatever its weights are
            return _trial(backend, causal_lm.double())
    return trial


def _trial(backend: Backend, causal_lm: CausalLM) -> Trial:
    decoder = backend.decoder(causal_lm).eval()
    for parameter in decoder.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=NOISE)

    first, other, second = _random_samples(causal_lm.config.get_text_config().vocab_size)
    pack = collate([first, second], packed=True)
    other_pack = collate([other, second], packed=True)
    padded = collate([first, second], packed=False)
    states = torch.cat(_states(backend, decoder, pack))
    expected = torch.cat(_states(backend, decoder, padded))
    after_other = torch.cat(_states(backend, decoder, other_pack))

    scale = expected.square().mean().sqrt()
    difference = float((states - expected).abs().max() / scale)
    leak = float((states - after_other)[len(first) :].abs().max() / scale)
    leaking_module = ""
    if leak > TOLERANCE:
        leaking_module = _leaking_module(backend, decoder, pack, other_pack)
    return Trial(type(causal_lm).__name__, leak, difference, leaking_module)


def _random_samples(vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids: a first sample, another one of its length with no token in its place, and a second sample."""
    lowest = vocab_size // 4  # the lowest ids, and the last, are of padding and borders
    count = vocab_size - 1 - lowest
    first = torch.randint(count, (LENGTHS[0],))
    other = (first + 1) % count
    second = torch.randint(count, (LENGTHS[1],))
    return lowest + first, lowest + other, lowest + second


def _states(backend: Backend, decoder: nn.Module, batch: Batch) -> list[Tensor]:
    """`[T_i, H]` of each sample."""
    return gather(batch, backend.hidden_states(decoder, batch).double())


class Call(NamedTuple):
    """What a module was called with and what it returned, of the second sample alone."""

    inputs: list[Tensor]
    outputs: list[Tensor]


def _leaking_module(backend: Backend, decoder: nn.Module, pack: Batch, other_pack: Batch) -> str:
    """The first module to return whose outputs move while its inputs do not."""
    calls = _recorded_calls(backend, decoder, pack)
    other_calls = _recorded_calls(backend, decoder, other_pack)
    modules = dict(decoder.named_modules())
    for name, call in calls.items():
        other_call = other_calls.get(name)
        if other_call is None or not call.inputs:
            continue
        if _moved(call.outputs, other_call.outputs) and not _moved(call.inputs, other_call.inputs):
            class_name = type(modules[name]).__name__
            if name:
                return f"{class_name} ({name})"
            return class_name
    return type(decoder).__name__


def _recorded_calls(backend: Backend, decoder: nn.Module, pack: Batch) -> dict[str, Call]:
    """By name of the module, in the order in which they return; of several calls the last."""
    calls: dict[str, Call] = {}
    with _hooks(decoder, calls):
        backend.hidden_states(decoder, pack)
    return calls


@contextmanager
def _hooks(decoder: nn.Module, calls: dict[str, Call]) -> Iterator[None]:
    handles = []
    for name, module in decoder.named_modules():

        def record(_: nn.Module, args: ModuleValues, kwargs: dict[str, Any], output: object, name: str = name) -> None:
            inputs = _of_second_sample((*args, *kwargs.values()))
            calls[name] = Call(inputs, _of_second_sample(output))

        handles.append(module.register_forward_hook(record, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _of_second_sample(values: object) -> list[Tensor]:
    """The entries of the second sample of tensors `[1, T, ...]` or `[T, ...]`, over the T tokens of the pack."""
    if isinstance(values, Mapping):  # the outputs of whole models
        values = tuple(values.values())
    if not isinstance(values, tuple | list):
        values = (values,)
    first_length = LENGTHS[0]
    total = sum(LENGTHS)
    found = []
    for value in values:
        if not isinstance(value, Tensor) or value.is_complex():  # rotations, which belong to positions
            continue
        if value.dim() >= 2 and value.shape[:2] == (1, total):
            found.append(value[0, first_length:])
        elif value.dim() >= 1 and len(value) == total:
            found.append(value[first_length:])
    return found


def _moved(values: list[Tensor], others: list[Tensor]) -> bool:
    for value, other in zip(values, others, strict=False):
        if value.shape != other.shape:
            continue
        scale = value.float().square().mean().sqrt()
        if not (value.float() - other.float()).abs().max() <= TOLERANCE * scale:
            return True
    return False
