"""The policy as one module: token ids in, log-probs and entropies out."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from molt.batch.collate import Batch
from molt.models.heads import token_logprobs


class PolicyModel(nn.Module):
    """A causal LM whose log-prob head runs inside the root module's forward.

    FSDP keeps the parameters of the root (embeddings, final norm, head) unsharded exactly there.
    causal_lm: of transformers or AutoModel; to_disk: (name, tensor) of its state to the (name, tensor) pairs that
    `from_pretrained` reads, which are more where experts are fused in memory.
    """

    def __init__(
        self,
        causal_lm: nn.Module,
        compute_dtype: torch.dtype,
        to_disk: Callable[[str, Tensor], Iterable[tuple[str, Tensor]]],
    ):
        super().__init__()
        self.causal_lm, self.compute_dtype, self.to_disk = causal_lm, compute_dtype, to_disk

    def forward(self, batch: Batch, *, temperature: float = 1.0, needed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, float32 `[B, T]`, entry t for token t; see `heads.token_logprobs`.

        needed: bool `[B, T]`, the only tokens that go through the head; None: every real one. The batch may live
        on the host. With FSDP, every rank calls it the same number of times.
        """
        head = self.causal_lm.get_output_embeddings()
        device = head.weight.device
        token_ids = batch.token_ids.to(device)
        cu_seqlens = None if batch.cu_seqlens is None else batch.cu_seqlens.to(device)
        segments = {}
        if cu_seqlens is not None:
            segments = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), cu_seqlens)
            segments |= dict.fromkeys(("max_length_q", "max_length_k"), batch.max_seqlen)
        # attention_mask must be None: an all-ones mask silently turns packing off; so does a cache.
        decoder = getattr(self.causal_lm, "base_model", None) or self.causal_lm.model
        hidden = decoder(
            input_ids=token_ids,
            attention_mask=None,
            position_ids=batch.position_ids.to(device),
            use_cache=False,
            **segments,
        )
        hidden = hidden if isinstance(hidden, Tensor) else hidden.last_hidden_state
        needed = batch.real if needed is None else needed & batch.real
        return token_logprobs(
            hidden,
            head.weight,
            token_ids,
            cu_seqlens,
            temperature=temperature,
            needed=needed.to(device),
            bias=head.bias,
            softcap=getattr(self.causal_lm.config, "final_logit_softcapping", None),
        )
