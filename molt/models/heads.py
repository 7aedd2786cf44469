"""From hidden states to the log-prob of each token. THE shift between logits and tokens lives here alone.

Entry t is `log p(token_t | tokens before t)`: it is computed from the hidden state of t - 1 and stored
at t. The first token of a sequence has no condition and gets 0.

[tokens, vocab] in float32 is never materialised: rows go through the head in chunks, in the forward
and again in the backward pass, which recomputes the logits instead of keeping them.
"""

import torch
from torch import Tensor


def _logits(hidden: Tensor, weight: Tensor, softcap: float | None, temperature: float) -> Tensor:
    """float32 [n, V], divided by the temperature."""
    logits = (hidden @ weight.t()).float()
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits.div_(temperature)


class _ChunkedLogProbs(torch.autograd.Function):
    """logprob[i] = z[i, token_i] - logsumexp(z[i]), z = hidden W' / temperature; entropy without gradient."""

    @staticmethod
    def forward(ctx, hidden, weight, token_ids, temperature, softcap, chunk):
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy, lse = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for i in range(0, len(hidden), chunk):
            rows = slice(i, i + chunk)
            z = _logits(hidden[rows], weight, softcap, temperature)
            lse[rows] = z.logsumexp(-1)
            logprobs[rows] = z.gather(1, token_ids[rows, None])[:, 0] - lse[rows]
            p = (z - lse[rows, None]).exp_()
            entropy[rows] = lse[rows] - p.mul_(z).sum(-1)
        ctx.save_for_backward(hidden, weight, token_ids, lse)
        ctx.settings = (temperature, softcap, chunk)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, token_ids, lse = ctx.saved_tensors
        temperature, softcap, chunk = ctx.settings
        # The weight's is summed in float32 whatever the compute dtype: there are many chunks.
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for i in range(0, len(hidden), chunk):
            rows = slice(i, i + chunk)
            z = _logits(hidden[rows], weight, softcap, temperature)
            # d logprob / dz = onehot(token) - softmax(z)
            d = (z - lse[rows, None]).exp_().mul_(-grad[rows, None])
            d.scatter_add_(1, token_ids[rows, None], grad[rows, None])
            if softcap is not None:
                d *= 1 - (z * (temperature / softcap)) ** 2  # tanh' = 1 - tanh²
            d = d.div_(temperature).to(hidden.dtype)
            torch.mm(d, weight, out=d_hidden[rows])
            if d.dtype == torch.float32:
                d_weight.addmm_(d.t(), hidden[rows])
            else:
                d_weight += d.t() @ hidden[rows]
        return d_hidden, d_weight.to(weight.dtype), None, None, None, None


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
    through the log-probs only. `chunk_elements` bounds the logits held at once, in float32 elements.
    Source: recomputed cross-entropy, Liger kernel, arXiv 2410.10989 (there fused with the loss; here per token).
    """
    if chunk_elements is None:  # large enough to keep the matrix units busy, small against the activations
        chunk_elements = 2**22 if hidden.device.type == "cpu" else 2**26
    scored = torch.ones_like(token_ids, dtype=torch.bool) if needed is None else needed.clone()
    # The first token of a sequence has no condition.
    scored[(slice(None), 0) if cu_seqlens is None else (0, cu_seqlens[:-1].long())] = False
    hidden = hidden.flatten(0, 1).index_select(0, scored.flatten().nonzero()[:, 0] - 1)  # THE shift
    if bias is not None:  # rare: one more input that is always 1
        hidden, weight = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], 1), torch.cat([weight, bias[:, None]], 1)
    chunk = max(1, chunk_elements // len(weight))
    values = _ChunkedLogProbs.apply(hidden, weight, token_ids[scored], temperature, softcap, chunk)
    zeros = torch.zeros_like(token_ids, dtype=torch.float32)
    return zeros.masked_scatter(scored, values[0]), zeros.masked_scatter(scored, values[1])
