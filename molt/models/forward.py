"""Policy and critic as one module each: token ids in; log-probs and entropies, or values out."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from molt.batch.collate import Batch
from molt.models.backends.protocol import Backend, CausalLM, ToDisk
from molt.models.heads import token_logprobs, token_values
from molt.models.load_balance import balance_loss, recorded_routes, refuse_balance


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The same batch with its tensors on the device."""
    cu_seqlens = batch.cu_seqlens
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(device)
    return replace(
        batch,
        token_ids=batch.token_ids.to(device),
        position_ids=batch.position_ids.to(device),
        cu_seqlens=cu_seqlens,
        real=batch.real.to(device),
    )


def _needed_tokens(batch: Batch, needed: Tensor | None) -> Tensor:
    """bool `[B, T]` on the batch's device: the needed tokens that are not padding, None: every one."""
    if needed is None:
        return batch.real
    return needed.to(batch.real.device) & batch.real


class PolicyOutput(NamedTuple):
    """What a forward of the policy gives, float32; entry t is of token t. FSDP finds the tensors in a tuple."""

    logprobs: Tensor
    """`[B, T]`."""
    entropy: Tensor
    """`[B, T]`."""
    candidate_logprobs: Tensor | None = None
    """`[B, T, K]`, of the candidates in the place of the token."""
    balance: Tensor | None = None
    """`[S]`, the load balance of each sequence."""


class PolicyModel(nn.Module):
    """A causal LM whose log-prob head runs inside the root module's forward.

    FSDP keeps the parameters of the root (embeddings, final norm, head) unsharded exactly there.
    to_disk: names and tensors as the files of the model have them; None: it is never written.
    """

    causal_lm: CausalLM
    backend: Backend
    compute_dtype: torch.dtype
    to_disk: ToDisk | None

    def __init__(
        self, causal_lm: CausalLM, backend: Backend, compute_dtype: torch.dtype, to_disk: ToDisk | None = None
    ):
        super().__init__()
        self.causal_lm = causal_lm
        self.backend = backend
        self.compute_dtype = compute_dtype
        self.to_disk = to_disk

    def forward(
        self,
        batch: Batch,
        *,
        temperature: float = 1.0,
        needed: Tensor | None = None,
        candidates: Tensor | None = None,
        balance: bool = False,
    ) -> PolicyOutput:
        """Log-probs and entropies, and what else is asked for; see `heads.token_logprobs`.

        needed: bool `[B, T]`, the only tokens that go through the head; None: every real one. candidates: int64
        `[B, T, K]`, tokens whose log-probs in the place of each token are wanted as well. balance: also return
        the load balance of all real tokens, see `load_balance.balance_loss`; with FSDP its gradient must come in one
        backward pass with that of the others. The batch may be on the host. With FSDP, every rank calls it the same
        number of times. Raises `ConfigError` for `balance` with a model without experts.
        """
        if not balance:
            return self._through_the_head(batch, temperature, needed, candidates)

        config = self.causal_lm.config
        routers = self.backend.routers(self.causal_lm)
        refuse_balance(config, "`balance` (=True)", len(routers))
        with recorded_routes(routers) as routes:
            output = self._through_the_head(batch, temperature, needed, candidates)
        return output._replace(balance=balance_loss(routes, config.model_type, batch))

    def _through_the_head(
        self, batch: Batch, temperature: float, needed: Tensor | None, candidates: Tensor | None
    ) -> PolicyOutput:
        decoder = self.backend.decoder(self.causal_lm)
        head = self.backend.head(self.causal_lm)
        batch = on_device(batch, head.weight.device)
        tokens = batch.token_ids[..., None]
        if candidates is not None:
            tokens = torch.cat([tokens, candidates.to(head.weight.device)], -1)
        logprobs, entropy = token_logprobs(
            self.backend.hidden_states(decoder, batch),
            head.weight,
            tokens,
            batch.cu_seqlens,
            temperature=temperature,
            needed=_needed_tokens(batch, needed),
            bias=head.bias,
            softcap=getattr(self.causal_lm.config, "final_logit_softcapping", None),
        )
        # Clones: FSDP hangs its backward hook on what is returned, which an in-place operation on a view would drop.
        output = PolicyOutput(logprobs=logprobs[..., 0].clone(), entropy=entropy)
        if candidates is not None:
            output = output._replace(candidate_logprobs=logprobs[..., 1:].clone())
        return output


class ValueModel(nn.Module):
    """The decoder of a causal LM, without its head, and a scalar head in float32 whatever the compute dtype.

    The head's weight is drawn from N(0, initializer range of the model), from torch's generator: ranks seed it alike.
    """

    decoder: nn.Module
    backend: Backend
    compute_dtype: torch.dtype

    def __init__(self, causal_lm: CausalLM, backend: Backend, compute_dtype: torch.dtype):
        super().__init__()
        self.decoder = backend.decoder(causal_lm)
        self.backend = backend
        self.compute_dtype = compute_dtype
        self.head = nn.Linear(causal_lm.config.hidden_size, 1, bias=False)
        initializer_range = getattr(causal_lm.config, "initializer_range", 0.02)
        nn.init.normal_(self.head.weight, std=initializer_range)

    def forward(self, batch: Batch, *, needed: Tensor | None = None) -> Tensor:
        """Values, float32 `[B, T]`; entry t is that of the state before token t; see `heads.token_values`.

        needed: bool `[B, T]`, the only tokens that go through the head; None: every real one. With FSDP, every rank
        calls it the same number of times.
        """
        batch = on_device(batch, self.head.weight.device)
        return token_values(
            self.backend.hidden_states(self.decoder, batch),
            self.head,
            _needed_tokens(batch, needed),
            batch.cu_seqlens,
        )
