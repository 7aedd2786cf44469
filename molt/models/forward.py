"""Policy and critic as one module each: token ids in; log-probs and entropies, or values out."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from molt.batch.collate import Batch
from molt.models.heads import token_logprobs, token_values
from molt.models.load_balance import balance_loss, routes


def decoder_of(causal_lm: nn.Module) -> nn.Module:
    """What is below the head of a model of transformers or AutoModel."""
    return getattr(causal_lm, "base_model", None) or causal_lm.model


def hidden_states(decoder: nn.Module, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """[B, T, H] after the final norm, and `batch.cu_seqlens` on the device. The batch may live on the host."""
    cu_seqlens = None if batch.cu_seqlens is None else batch.cu_seqlens.to(device)
    segments = {}
    if cu_seqlens is not None:
        segments = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), cu_seqlens)
        segments |= dict.fromkeys(("max_length_q", "max_length_k"), batch.max_seqlen)
    # attention_mask must be None: an all-ones mask silently turns packing off; so does a cache.
    hidden = decoder(
        input_ids=batch.token_ids.to(device),
        attention_mask=None,
        position_ids=batch.position_ids.to(device),
        use_cache=False,
        **segments,
    )
    return hidden if isinstance(hidden, Tensor) else hidden.last_hidden_state, cu_seqlens


class PolicyModel(nn.Module):
    """A causal LM whose log-prob head runs inside the root module's forward.

    FSDP keeps the parameters of the root (embeddings, final norm, head) unsharded exactly there.
    causal_lm: of transformers or AutoModel; to_disk: (name, tensor) of its state to the (name, tensor) pairs that
    `from_pretrained` reads, which are more where experts are fused in memory; None: it is never written.
    """

    def __init__(
        self,
        causal_lm: nn.Module,
        compute_dtype: torch.dtype,
        to_disk: Callable[[str, Tensor], Iterable[tuple[str, Tensor]]] | None = None,
    ):
        super().__init__()
        self.causal_lm, self.compute_dtype, self.to_disk = causal_lm, compute_dtype, to_disk

    def forward(
        self, batch: Batch, *, temperature: float = 1.0, needed: Tensor | None = None, balance: bool = False
    ) -> tuple[Tensor, ...]:
        """Log-probs and entropies, float32 `[B, T]`, entry t for token t; see `heads.token_logprobs`.

        needed: bool `[B, T]`, the only tokens that go through the head; None: every real one. balance: also return
        the load balance of all real tokens, float32 `[S]`, see `balance.balance_loss`; with FSDP its gradient must
        come in one backward pass with that of the others. With FSDP, every rank calls it the same number of times.
        Raises `ConfigError` when balance is asked of a model without experts.
        """
        head = self.causal_lm.get_output_embeddings()
        device = head.weight.device
        with routes(self.causal_lm) if balance else nullcontext() as found:
            hidden, cu_seqlens = hidden_states(decoder_of(self.causal_lm), batch, device)
        real = batch.real.to(device)
        output = token_logprobs(
            hidden,
            head.weight,
            batch.token_ids.to(device),
            cu_seqlens,
            temperature=temperature,
            needed=real if needed is None else needed.to(device) & real,
            bias=head.bias,
            softcap=getattr(self.causal_lm.config, "final_logit_softcapping", None),
        )
        return (*output, balance_loss(found, self.causal_lm.config.model_type, batch)) if balance else output


class ValueModel(nn.Module):
    """The decoder of a causal LM, without its head, and a scalar head in float32 whatever the compute dtype.

    The head's weight is drawn from N(0, initializer range of the model), from torch's generator: ranks seed it alike.
    """

    def __init__(self, causal_lm: nn.Module, compute_dtype: torch.dtype):
        super().__init__()
        config = causal_lm.config
        self.decoder, self.compute_dtype = decoder_of(causal_lm), compute_dtype
        self.head = nn.Linear(config.hidden_size, 1, bias=False)
        nn.init.normal_(self.head.weight, std=getattr(config, "initializer_range", 0.02))

    def forward(self, batch: Batch, *, needed: Tensor | None = None) -> Tensor:
        """Values, float32 `[B, T]`; entry t is that of the state before token t; see `heads.token_values`.

        needed: bool `[B, T]`, the only tokens that go through the head; None: every real one. With FSDP, every rank
        calls it the same number of times.
        """
        device = self.head.weight.device
        hidden, cu_seqlens = hidden_states(self.decoder, batch, device)
        real = batch.real.to(device)
        return token_values(hidden, self.head, real if needed is None else needed.to(device) & real, cu_seqlens)
