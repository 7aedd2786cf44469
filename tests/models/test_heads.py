"""The chunked log-prob head against log_softmax over all logits."""

import pytest
import torch

from molt.models import heads
from molt.models.heads import token_values

VOCAB, HIDDEN = 50, 8


def token_logprobs(hidden, weight, token_ids, *args, **kwargs):
    """Of one token in each place, `[B, T]`."""
    logprobs, entropy = heads.token_logprobs(hidden, weight, token_ids[..., None], *args, **kwargs)
    return logprobs[..., 0], entropy


def naive(hidden, weight, token_ids, *, temperature, bias=None, softcap=None):
    """[B, T] log-probs and entropies, entry t for token t, of unpacked rows."""
    logits = hidden @ weight.t()
    logits = logits if bias is None else logits + bias
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logp = (logits / temperature).log_softmax(-1)[:, :-1]
    picked = logp.gather(-1, token_ids[:, 1:, None])[..., 0]
    entropy = -(logp.exp() * logp).sum(-1)
    first = torch.zeros(len(hidden), 1)
    return torch.cat([first, picked], 1), torch.cat([first, entropy], 1)


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    hidden = torch.randn(3, 7, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    bias = torch.randn(VOCAB, requires_grad=True)
    return hidden, weight, bias, torch.randint(0, VOCAB, (3, 7)), torch.randn(3, 7)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias_and_softcap"])
def test_values_entropy_and_gradients_equal_naive(inputs, temperature, chunk, extras):
    hidden, weight, bias, token_ids, upstream = inputs
    extra = {"bias": bias, "softcap": 3.0} if extras else {}
    wrt = (hidden, weight, bias) if extras else (hidden, weight)
    want, want_entropy = naive(hidden, weight, token_ids, temperature=temperature, **extra)
    got, entropy = token_logprobs(
        hidden, weight, token_ids, None, temperature=temperature, chunk_elements=chunk * VOCAB, **extra
    )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, want_entropy, atol=1e-5, rtol=0)
    expected = torch.autograd.grad((want * upstream).sum(), wrt)
    for grad, reference in zip(torch.autograd.grad((got * upstream).sum(), wrt), expected, strict=True):
        torch.testing.assert_close(grad, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias_and_softcap"])
@pytest.mark.parametrize("both", [False, True], ids=["entropy", "with_logprobs"])
def test_the_gradient_of_the_entropy_is_that_of_a_full_softmax(inputs, packed, chunk, extras, both):
    hidden, weight, bias, token_ids, upstream = inputs
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    extra, exact_extra = ({"bias": bias, "softcap": 3.0}, {"bias": exact[2], "softcap": 3.0}) if extras else ({}, {})
    needed = torch.rand(3, 7) < 0.7
    cu_seqlens = torch.tensor([0, 7, 14, 21], dtype=torch.int32) if packed else None
    got = token_logprobs(
        hidden.reshape(1, 21, HIDDEN) if packed else hidden, weight,
        token_ids.reshape(1, 21) if packed else token_ids, cu_seqlens,
        needed=needed.reshape(1, 21) if packed else needed, temperature=0.7, chunk_elements=chunk * VOCAB, **extra,
    )  # fmt: skip
    want = naive(*exact[:2], token_ids, temperature=0.7, **exact_extra)
    loss, exact_loss = ((2 * e + both * lp).reshape(3, 7) * upstream * needed for lp, e in (got, want))
    wrt = 3 if extras else 2
    expected = torch.autograd.grad(exact_loss.sum(), exact[:wrt])
    grads = torch.autograd.grad(loss.sum(), inputs[:wrt], retain_graph=True)
    for grad, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.double(), reference, atol=2e-5, rtol=1e-5)
    again = torch.autograd.grad(loss.sum(), inputs[:wrt])  # the first pass overwrote the logits that were kept
    assert all(map(torch.equal, grads, again))


def test_an_entropy_that_nobody_differentiates_costs_nothing(inputs, monkeypatch):
    hidden, weight, _, token_ids, upstream = inputs
    entropy_grads, compute = [], heads._logits_to_gradient

    def record_and_compute(logits, given, head):
        entropy_grads.append(given.entropy_grad)
        compute(logits, given, head)

    monkeypatch.setattr(heads, "_logits_to_gradient", record_and_compute)
    logprobs, entropy = token_logprobs(hidden, weight, token_ids, None)
    float(entropy.detach().sum())
    (logprobs * upstream).sum().backward()
    assert entropy_grads == [None]


def test_a_value_is_that_of_the_state_before_the_token(inputs):
    hidden, weight, *_ = inputs
    needed = torch.ones(3, 7, dtype=torch.bool)
    needed[1, 3] = False
    got = token_values(hidden, lambda states: states @ weight[:1].t(), needed, None)
    want = torch.zeros(3, 7)
    for row in range(3):
        for t in range(1, 7):  # nothing comes before token 0
            want[row, t] = hidden[row, t - 1] @ weight[0] if needed[row, t] else 0.0
    torch.testing.assert_close(got, want)
    cu_seqlens = torch.tensor([0, 7, 14, 21], dtype=torch.int32)
    packed = token_values(
        hidden.reshape(1, 21, HIDDEN), lambda states: states @ weight[:1].t(), needed.reshape(1, 21), cu_seqlens
    )
    assert torch.equal(packed.reshape(3, 7), got)


def test_only_needed_tokens_go_through_the_head(inputs):
    hidden, weight, _, token_ids, upstream = inputs
    needed = torch.rand(3, 7) < 0.4
    needed[:, 0] = True  # asked for, and still 0: nothing comes before it
    want, want_entropy = naive(hidden, weight, token_ids, temperature=1.0)
    got, entropy = token_logprobs(hidden, weight, token_ids, None, needed=needed)
    torch.testing.assert_close(got, want * needed)
    torch.testing.assert_close(entropy, want_entropy * needed)
    expected = torch.autograd.grad((want * needed * upstream).sum(), (hidden, weight))
    for grad, reference in zip(torch.autograd.grad((got * upstream).sum(), (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(grad, reference, atol=1e-5, rtol=1e-5)


def test_a_second_backward_pass_gives_the_same_gradients(inputs):
    """The first one overwrites the logits that the forward kept."""
    hidden, weight, _, token_ids, upstream = inputs
    got, _ = token_logprobs(hidden, weight, token_ids, None, chunk_elements=7 * VOCAB)
    loss = (got * upstream).sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, (hidden, weight))))


def test_nothing_needed_still_has_a_backward_pass(inputs):
    hidden, weight, _, token_ids, _ = inputs
    got, _ = token_logprobs(hidden, weight, token_ids, None, needed=torch.zeros(3, 7, dtype=torch.bool))
    got.sum().backward()
    assert not got.any() and not hidden.grad.any() and not weight.grad.any()


def test_packed_rows_never_predict_across_a_boundary(inputs):
    hidden, weight, _, token_ids, _ = inputs
    rows, _ = token_logprobs(hidden, weight, token_ids, None)
    cu_seqlens = torch.tensor([0, 7, 14, 21], dtype=torch.int32)
    packed, _ = token_logprobs(hidden.reshape(1, 21, HIDDEN), weight, token_ids.reshape(1, 21), cu_seqlens)
    torch.testing.assert_close(packed.reshape(3, 7), rows)
    assert not packed[0, cu_seqlens[:-1].long()].any()


def test_bfloat16_logits_are_reduced_in_float32(inputs):
    hidden, weight, _, token_ids, _ = inputs
    got, _ = token_logprobs(hidden.bfloat16(), weight.bfloat16(), token_ids, None)
    want, _ = naive(hidden.bfloat16().float(), weight.bfloat16().float(), token_ids, temperature=1.0)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, atol=0.1, rtol=0)
    got.sum().backward()
    assert hidden.grad.isfinite().all() and weight.grad.any()


@pytest.mark.parametrize("chunk", [4, 1000])
def test_several_candidates_in_the_place_of_a_token(inputs, chunk):
    """Values and gradients as of a full softmax; a candidate that occurs twice counts twice."""
    hidden, weight, _, _, _ = inputs
    candidates = torch.randint(0, VOCAB, (3, 7, 5))
    candidates[..., 4] = candidates[..., 0]
    upstream = torch.randn(3, 7, 5)
    got, entropy = heads.token_logprobs(hidden, weight, candidates, None, temperature=0.7, chunk_elements=chunk * VOCAB)
    logp = (hidden @ weight.t() / 0.7).log_softmax(-1)[:, :-1]
    want = torch.cat([torch.zeros(3, 1, 5), logp.gather(-1, candidates[:, 1:])], 1)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    _, entropy_alone = token_logprobs(hidden, weight, candidates[..., 0], None, temperature=0.7)
    torch.testing.assert_close(entropy, entropy_alone)
    expected = torch.autograd.grad((want * upstream).sum(), (hidden, weight))
    for grad, reference in zip(torch.autograd.grad((got * upstream).sum(), (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(grad, reference, atol=1e-5, rtol=1e-5)
