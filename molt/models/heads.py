"""From hidden states to the log-prob or the value of each token. THE shift between the two lives here alone.

Entry t is `log p(token_t | tokens before t)`, or the value of the tokens before t: it is computed from the hidden
state of t - 1 and stored at t. The first token of a sequence has no condition and gets 0.

[tokens, vocab] in float32 is never materialised: rows go through the head in chunks, in the forward
and again in the backward pass, which recomputes the logits instead of keeping them. The last chunk is
kept, since backward begins with it: what fits in one chunk is computed once.
"""

from collections.abc import Callable
from itertools import repeat

import torch
from torch import Tensor

BLOCKS = 16
"""Everything but the matrix products goes over a chunk in so many blocks of rows: temporaries stay small, and on a
CPU in the cache."""


def _logits(hidden: Tensor, weight: Tensor, softcap: float | None, temperature: float) -> Tensor:
    """float32 [n, V], divided by the temperature."""
    logits = (hidden @ weight.t()).float()
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits if temperature == 1 else logits.div_(temperature)


def _lse_and_entropy(z: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [n] each: logsumexp(z), and the entropy of softmax(z), for z [n, V]."""
    p = z.softmax(-1)
    lse = z.amax(-1) - p.amax(-1).log()  # the largest p is 1 / sum(exp(z - max z))
    return lse, lse - p.mul_(z).sum(-1)


def _to_gradient(
    z: Tensor, lse: Tensor, token_ids: Tensor, grad: Tensor, bonus: Tensor | None, cap: float | None, block: int
) -> None:
    """z [n, V] becomes, in place, grad * d logprob / d logits + bonus[:, 1] * d entropy / d logits.

    bonus: [n, 2], the entropy and its upstream gradient, or None; cap: softcap / temperature.
    """
    columns = (t.split(block) for t in (z, lse[:, None], token_ids[:, None], grad[:, None]))
    bonuses = repeat(None, -(-len(z) // block)) if bonus is None else bonus.split(block)
    for part, lse, token, weight, both in zip(*columns, bonuses, strict=True):
        slope = None if cap is None else 1 - (part / cap) ** 2  # tanh' = 1 - tanh²
        part.sub_(lse)
        # d logprob / dz = onehot(token) - p; d H / dz = -p (log p + H)
        factor = -weight if both is None else (part + both[:, :1]).mul_(-both[:, 1:]).sub_(weight)
        part.exp_().mul_(factor).scatter_add_(1, token, weight)
        if slope is not None:
            part.mul_(slope)


class _ChunkedLogProbs(torch.autograd.Function):
    """logprob[i] = z[i, token_i] - logsumexp(z[i]) and the entropy of softmax(z[i]), z = hidden W' / temperature."""

    @staticmethod
    def forward(ctx, hidden, weight, token_ids, temperature, softcap, chunk):
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy, lse, z = torch.empty_like(logprobs), torch.empty_like(logprobs), None
        for i in range(0, len(hidden), chunk):
            rows, z = slice(i, i + chunk), None  # the last chunk is freed before the next is made
            z = _logits(hidden[rows], weight, softcap, temperature)
            blocks = [_lse_and_entropy(block) for block in z.split(-(-chunk // BLOCKS))]
            lse[rows], entropy[rows] = (torch.cat(parts) for parts in zip(*blocks, strict=True))
            logprobs[rows] = z.gather(1, token_ids[rows, None])[:, 0] - lse[rows]
        ctx.save_for_backward(hidden, weight, token_ids, lse, entropy)
        ctx.last, ctx.settings = z, (temperature, softcap, chunk)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, entropy_grad):
        hidden, weight, token_ids, lse, entropy = ctx.saved_tensors
        temperature, softcap, chunk = ctx.settings
        z, ctx.last = ctx.last, None  # overwritten below: another backward pass computes it again
        cap = None if softcap is None else softcap / temperature
        grad = torch.zeros_like(lse) if grad is None else grad / temperature
        bonus = None if entropy_grad is None else torch.stack([entropy, entropy_grad / temperature], 1)
        # The weight's is summed in float32 whatever the compute dtype: there are many chunks.
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for i in reversed(range(0, len(hidden), chunk)):
            rows = slice(i, i + chunk)
            if z is None:
                z = _logits(hidden[rows], weight, softcap, temperature)
            extra = None if bonus is None else bonus[rows]
            _to_gradient(z, lse[rows], token_ids[rows], grad[rows], extra, cap, -(-chunk // BLOCKS))
            d, z = z.to(hidden.dtype), None
            torch.mm(d, weight, out=d_hidden[rows])
            if d.dtype == torch.float32:
                d_weight.addmm_(d.t(), hidden[rows])
            else:
                d_weight += d.t() @ hidden[rows]
            del d
        return d_hidden, d_weight.to(weight.dtype), None, None, None, None


def _before(hidden: Tensor, needed: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """bool [B, T], the needed tokens without the first of each sequence; [n, H], the state before each of them."""
    scored = needed.clone()
    # The first token of a sequence has no condition.
    scored[(slice(None), 0) if cu_seqlens is None else (0, cu_seqlens[:-1].long())] = False
    return scored, hidden.flatten(0, 1).index_select(0, scored.flatten().nonzero()[:, 0] - 1)  # THE shift


def token_values(hidden: Tensor, head: Callable[[Tensor], Tensor], needed: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """`head(hidden[t - 1])` at t: the value of the state before token t.

    hidden, needed, cu_seqlens: as of `token_logprobs`; head: float32 [n, H] to [n, 1]. Returns float32 [B, T], 0 at
    the first token of each sequence and where not needed.
    """
    scored, before = _before(hidden, needed, cu_seqlens)
    return torch.zeros_like(scored, dtype=torch.float32).masked_scatter(scored, head(before.float())[:, 0])


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    cu_seqlens: Tensor | None,
    *,
    temperature: float = 1.0,
    needed: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`log softmax(head(hidden[t - 1]) / temperature)[token_t]` and the entropy of that distribution, at t.

    hidden: [B, T, H] after the final norm; weight: [V, H] of the same dtype; token_ids: int64 [B, T];
    cu_seqlens: int32 [S + 1] of a packed row (then B = 1) or None; needed: bool [B, T], the only tokens that
    go through the head (None: all); bias: [V]; softcap: logits become `softcap * tanh(logits / softcap)`.
    Returns float32 [B, T] twice, 0 at the first token of each sequence and where not needed. Gradients flow
    through both, and that of the entropy costs nothing unless it is asked for. `chunk_elements` bounds the logits
    held at once, in float32 elements.
    Source: recomputed cross-entropy, Liger kernel, arXiv 2410.10989 (there fused with the loss; here per token).
    """
    if chunk_elements is None:  # large enough to keep the matrix units busy, small against the activations
        chunk_elements = 2**25 if hidden.device.type == "cpu" else 2**26
    everywhere = torch.ones_like(token_ids, dtype=torch.bool)
    scored, hidden = _before(hidden, everywhere if needed is None else needed, cu_seqlens)
    if bias is not None:  # rare: one more input that is always 1
        hidden, weight = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], 1), torch.cat([weight, bias[:, None]], 1)
    chunk = max(1, chunk_elements // len(weight))
    values = _ChunkedLogProbs.apply(hidden, weight, token_ids[scored], temperature, softcap, chunk)
    zeros = torch.zeros_like(token_ids, dtype=torch.float32)
    return zeros.masked_scatter(scored, values[0]), zeros.masked_scatter(scored, values[1])
