"""From hidden states to the log-prob or the value of each token. THE shift between the two lives here alone.

Entry t is `log p(token_t | tokens before t)`, or the value of the tokens before t. It is computed from the hidden
state of t - 1 and stored at t. The first token of a sequence has no condition and gets 0.

A float32 tensor of [tokens, vocab] never exists: rows go through the head in chunks. The backward pass computes the
logits of a chunk again instead of keeping them, except for those of the last chunk, with which it begins. So what fits
into one chunk is computed once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCKS = 16
"""Everything but the matrix products goes over a chunk in so many blocks of rows: temporaries stay small, and on a
CPU in the cache."""
CPU_CHUNK_ELEMENTS = 2**25
GPU_CHUNK_ELEMENTS = 2**26
"""Logits held at once: enough to keep the matrix units busy, small against the activations."""


@dataclass(frozen=True)
class _Head:
    """How logits are made of hidden states, and how many rows at a time."""

    temperature: float
    softcap: float | None
    chunk: int
    """Rows whose logits exist at the same time."""

    @property
    def block(self) -> int:
        """Rows that everything but the matrix products takes at once."""
        return -(-self.chunk // BLOCKS)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """float32 `[n, V]` of hidden `[n, H]` and weight `[V, H]`, divided by the temperature."""
        logits = (hidden @ weight.t()).float()
        if self.softcap is not None:
            logits.div_(self.softcap)
            logits.tanh_()
            logits.mul_(self.softcap)
        if self.temperature != 1:
            logits.div_(self.temperature)
        return logits


def _normalizer_and_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`logsumexp(logits)` and the entropy of `softmax(logits)`, float32 `[n]` each, for logits `[n, V]`."""
    probs = logits.softmax(-1)
    # The largest probability is 1 / sum(exp(logits - max(logits))).
    normalizer = logits.amax(-1) - probs.amax(-1).log()
    mean_logit = probs.mul_(logits).sum(-1)
    return normalizer, normalizer - mean_logit


def _normalizers_and_entropies(logits: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """`_normalizer_and_entropy` of a chunk, so many rows at a time."""
    normalizers = []
    entropies = []
    for block_logits in logits.split(block):
        normalizer, entropy = _normalizer_and_entropy(block_logits)
        normalizers.append(normalizer)
        entropies.append(entropy)
    return torch.cat(normalizers), torch.cat(entropies)


@dataclass(frozen=True)
class _RowGradients:
    """What the gradient of the loss to each row's logits is made of, besides the logits."""

    token_ids: Tensor
    """int64 `[n, J]`, the tokens whose log-probs were taken."""
    normalizer: Tensor
    """float32 `[n]`, logsumexp of the logits."""
    entropy: Tensor
    """float32 `[n]`."""
    logprob_grad: Tensor
    """float32 `[n, J]`, d loss / d logprob, divided by the temperature."""
    entropy_grad: Tensor | None
    """float32 `[n]`, d loss / d entropy, divided by the temperature; None if the loss does not depend on it."""

    def rows(self, rows: slice) -> "_RowGradients":
        """The same of some rows only."""
        entropy_grad = None
        if self.entropy_grad is not None:
            entropy_grad = self.entropy_grad[rows]
        return _RowGradients(
            token_ids=self.token_ids[rows],
            normalizer=self.normalizer[rows],
            entropy=self.entropy[rows],
            logprob_grad=self.logprob_grad[rows],
            entropy_grad=entropy_grad,
        )


def _logits_to_gradient(logits: Tensor, given: _RowGradients, head: _Head) -> None:
    """Overwrite the logits `[n, V]` of a chunk with the gradient of the loss to them, so many rows at a time."""
    for start in range(0, len(logits), head.block):
        rows = slice(start, start + head.block)
        _block_to_gradient(logits[rows], given.rows(rows), head)


def _block_to_gradient(logits: Tensor, given: _RowGradients, head: _Head) -> None:
    """`sum_j logprob_grad_j (onehot(token_j) - p) - entropy_grad p (log p + entropy)`, in place, for logits `[n, V]`.

    With a softcap each entry is multiplied by the slope of the cap, `1 - tanh^2`.
    """
    slope = None
    if head.softcap is not None:
        scaled_softcap = head.softcap / head.temperature
        slope = 1 - (logits / scaled_softcap) ** 2

    log_probs = logits.sub_(given.normalizer[:, None])
    summed_grad = given.logprob_grad.sum(1, keepdim=True)

    if given.entropy_grad is None:
        factor = -summed_grad
    else:
        factor = log_probs + given.entropy[:, None]
        factor.mul_(-given.entropy_grad[:, None])
        factor.sub_(summed_grad)

    gradient = log_probs.exp_()
    gradient.mul_(factor)
    gradient.scatter_add_(1, given.token_ids, given.logprob_grad)
    if slope is not None:
        gradient.mul_(slope)


class _ChunkedLogProbs(torch.autograd.Function):
    """`logprob[i, j] = z[i, token_ij] - logsumexp(z[i])` and the entropy of `softmax(z[i])`, with `z = hidden W' / T`.

    hidden: `[n, H]`; weight: `[V, H]`; token_ids: int64 `[n, J]`; T: the temperature. Returns float32 `[n, J]`, `[n]`.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, token_ids: Tensor, head: _Head) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(token_ids.shape, dtype=torch.float32)
        entropy = hidden.new_empty(len(hidden), dtype=torch.float32)
        normalizer = torch.empty_like(entropy)

        logits = None
        for start in range(0, len(hidden), head.chunk):
            rows = slice(start, start + head.chunk)
            logits = None  # frees those of the chunk before
            logits = head.logits(hidden[rows], weight)
            normalizer[rows], entropy[rows] = _normalizers_and_entropies(logits, head.block)
            token_logits = logits.gather(1, token_ids[rows])
            logprobs[rows] = token_logits - normalizer[rows, None]

        ctx.save_for_backward(hidden, weight, token_ids, normalizer, entropy)
        ctx.last_logits = logits
        ctx.head = head
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, token_ids, normalizer, entropy = ctx.saved_tensors
        head: _Head = ctx.head
        given = _row_gradients(output_grads, token_ids, normalizer, entropy, head.temperature)

        # They are overwritten below, so a second backward pass computes them again.
        logits = ctx.last_logits
        ctx.last_logits = None

        hidden_grad = torch.empty_like(hidden)
        # Summed in float32 whatever the compute dtype, because there are many chunks.
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for start in reversed(range(0, len(hidden), head.chunk)):
            rows = slice(start, start + head.chunk)
            if logits is None:
                logits = head.logits(hidden[rows], weight)
            _logits_to_gradient(logits, given.rows(rows), head)
            logits_grad = logits.to(hidden.dtype)
            logits = None  # the float32 ones are freed before the matrix products

            torch.mm(logits_grad, weight, out=hidden_grad[rows])
            if logits_grad.dtype == torch.float32:
                weight_grad.addmm_(logits_grad.t(), hidden[rows])
            else:
                weight_grad += logits_grad.t() @ hidden[rows]
            del logits_grad  # freed before the logits of the next chunk are made

        return hidden_grad, weight_grad.to(weight.dtype), None, None


def _row_gradients(
    output_grads: tuple[Tensor | None, ...],
    token_ids: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    temperature: float,
) -> _RowGradients:
    """output_grads: float32 `[n, J]` for log-probs and `[n]` for entropies, None if the loss does not depend on it."""
    logprob_grad, entropy_grad = output_grads
    if logprob_grad is None:
        logprob_grad = torch.zeros_like(token_ids, dtype=torch.float32)
    else:
        logprob_grad = logprob_grad / temperature
    if entropy_grad is not None:
        entropy_grad = entropy_grad / temperature
    return _RowGradients(
        token_ids=token_ids,
        normalizer=normalizer,
        entropy=entropy,
        logprob_grad=logprob_grad,
        entropy_grad=entropy_grad,
    )


def _predicted_tokens(needed: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """bool `[B, T]`: the needed tokens without the first of each sequence, which nothing predicts."""
    predicted = needed.clone()
    if cu_seqlens is None:
        predicted[:, 0] = False
    else:
        first_tokens = cu_seqlens[:-1].long()
        predicted[0, first_tokens] = False
    return predicted


def _states_before(hidden: Tensor, predicted: Tensor) -> Tensor:
    """`[n, H]`, the hidden state before each of the n predicted tokens: THE shift."""
    cells = predicted.flatten().nonzero()[:, 0]
    return hidden.flatten(0, 1).index_select(0, cells - 1)


def token_values(hidden: Tensor, head: Callable[[Tensor], Tensor], needed: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """`head(hidden[t - 1])` at t: the value of the state before token t.

    hidden, needed, cu_seqlens: as of `token_logprobs`; head: float32 `[n, H]` to `[n, 1]`. Returns float32 `[B, T]`,
    0 at the first token of each sequence and where not needed.
    """
    predicted = _predicted_tokens(needed, cu_seqlens)
    states = _states_before(hidden, predicted)
    values = head(states.float())[:, 0]
    zeros = torch.zeros_like(predicted, dtype=torch.float32)
    return zeros.masked_scatter(predicted, values)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    cu_seqlens: Tensor | None,
    *,
    temperature: float = 1.0,
    needed: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`log softmax(head(hidden[t - 1]) / temperature)` of J tokens in the place of token t, and that entropy, at t.

    hidden: `[B, T, H]` after the final norm; weight: `[V, H]` of the same dtype; tokens: int64 `[B, T, J]`, the token
    itself and others that could stand there; cu_seqlens: int32 `[S + 1]` of a packed row (then B = 1) or None; needed:
    bool `[B, T]`, the only places that go through the head (None: all); bias: `[V]`; softcap: logits become
    `softcap * tanh(logits / softcap)`. Returns float32 `[B, T, J]` and `[B, T]`, 0 at the first token of each sequence
    and where not needed. Gradients flow through both; that of the entropy costs nothing where the loss does not use it.
    `chunk_elements` bounds the logits held at once, in float32 elements.
    Source: recomputed cross-entropy, Liger kernel, arXiv 2410.10989 (there fused with the loss; here per token).
    """
    if needed is None:
        needed = torch.ones_like(tokens[..., 0], dtype=torch.bool)
    predicted = _predicted_tokens(needed, cu_seqlens)
    states = _states_before(hidden, predicted)
    if bias is not None:  # rare: one more input that is always 1
        ones = states.new_ones(len(states), 1)
        states = torch.cat([states, ones], 1)
        weight = torch.cat([weight, bias[:, None]], 1)

    if chunk_elements is None:
        chunk_elements = CPU_CHUNK_ELEMENTS if states.device.type == "cpu" else GPU_CHUNK_ELEMENTS
    head = _Head(
        temperature=temperature,
        softcap=softcap,
        chunk=max(1, chunk_elements // len(weight)),
    )
    logprobs, entropy = _ChunkedLogProbs.apply(states, weight, tokens[predicted], head)

    all_logprobs = torch.zeros_like(tokens, dtype=torch.float32)
    all_entropies = torch.zeros_like(tokens[..., 0], dtype=torch.float32)
    return (
        all_logprobs.masked_scatter(predicted[..., None].expand_as(all_logprobs), logprobs),
        all_entropies.masked_scatter(predicted, entropy),
    )
