import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from molt.algo.importance import GATINGS, MODES, correction, describe
from molt.batch.collate import collate, gather, scatter
from molt.config import AdvantageConfig
from molt.errors import TrainingError

CASES = [("token", mode) for mode in MODES] + [("seq", "mask"), ("geo", "mask")]


def reference(samples, level, mode, low, high):
    """Sample by sample in float64: `(coefficients, insides)`, one list per sample each."""
    coefficients = []
    insides = []
    for old, rollout, mask in samples:
        log_w = np.clip(np.array(old) - np.array(rollout), -30, 30)
        w = np.exp(log_w)
        trained = np.array(mask)
        total = math.fsum(log_w[trained])
        with np.errstate(over="ignore"):
            statistic = {"token": w, "seq": np.exp(total), "geo": np.exp(total / max(1, trained.sum()))}[level]
        assume(not np.isclose(statistic, low, rtol=1e-9).any() and not np.isclose(statistic, high, rtol=1e-9).any())
        inside = (low <= statistic) & (statistic <= high)
        if mode == "trunc":
            inside = statistic <= high
        value = {"mask": np.where(inside, w, 0), "clip": np.clip(w, low, high), "trunc": np.minimum(w, high)}[mode]
        coefficients.append(np.where(trained, value, 0).tolist())
        insides.append((inside & trained).tolist())
    return coefficients, insides


def corrected(samples, packed, **settings):
    """The same through `correction`, laid out as a micro-batch."""
    batch = collate([np.zeros(len(old), np.int64) for old, _, _ in samples], packed=packed)
    tensors = [
        scatter(batch, [np.array(sample[i], dtype) for sample in samples]) for i, dtype in enumerate(("f8", "f8", "?"))
    ]
    return [[t.tolist() for t in gather(batch, values)] for values in correction(*tensors, batch.segments, **settings)]


far = st.floats(-40, 0)
near = st.floats(-1, -0.5)
token = st.one_of(st.tuples(far, far, st.booleans()), st.tuples(near, near, st.booleans()))
sample = st.lists(token, min_size=1, max_size=12).map(lambda tokens: tuple(zip(*tokens, strict=True)))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("level", "mode"), CASES)
@given(st.lists(sample, min_size=1, max_size=5), st.floats(0, 0.9), st.floats(1.1, 9))
def test_every_level_and_mode_matches_the_reference(level, mode, packed, samples, low, high):
    expected, expected_inside = reference(samples, level, mode, low, high)
    coefficient, inside = corrected(samples, packed, level=level, mode=mode, low=low, high=high)
    for ours, theirs in zip(coefficient, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert inside == expected_inside


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("level", ["seq", "geo"])
@given(samples=st.lists(sample, min_size=1, max_size=5))
def test_a_sample_is_kept_or_dropped_as_a_whole_whatever_is_beside_it(level, packed, samples):
    settings = {"level": level, "mode": "mask", "low": 0.5, "high": 5.0}
    coefficient, inside = corrected(samples, packed, **settings)
    for i, (old, rollout, mask) in enumerate(samples):
        kept = {a for a, trained in zip(inside[i], mask, strict=True) if trained}
        assert len(kept) <= 1
        w = np.exp(np.clip(np.subtract(old, rollout), -30, 30))
        expected = np.where(mask, w, 0) if kept == {True} else np.zeros(len(old))
        np.testing.assert_allclose(coefficient[i], expected, rtol=1e-6)
        ((alone,), _) = corrected([samples[i]], packed, **settings)
        assert alone == coefficient[i]


@pytest.mark.parametrize(
    ("mode", "coefficients", "insides"),
    [
        ("mask", [0, 1, 2, 0, 0], [False, True, True, False, False]),
        ("clip", [0.5, 1, 2, 4, 0], [False, True, True, False, False]),
        ("trunc", [0.25, 1, 2, 4, 0], [True, True, True, False, False]),
    ],
)
def test_every_mode_by_hand(mode, coefficients, insides):
    # w = 1/4, 1, 2, 8 in the band [1/2, 4], and a token that is not trained.
    old = torch.tensor([0.25, 1.0, 2.0, 8.0, 1.0]).log()
    mask = torch.tensor([True, True, True, True, False])
    one = torch.zeros(5, dtype=torch.int64)
    coefficient, inside = correction(old, torch.zeros(5), mask, one, level="token", mode=mode, low=0.5, high=4.0)
    assert coefficient.tolist() == pytest.approx(coefficients)
    assert inside.tolist() == insides


@pytest.mark.parametrize(("level", "kept"), [("seq", [False, True, False]), ("geo", [True, True, False])])
def test_every_level_by_hand(level, kept):
    # Band [1/2, 4]. w = 3, 3: product 9, geometric mean 3. w = 8, 1/4 and an untrained 100: 2 and sqrt(2). w = 1/8.
    samples = [
        (np.log([3, 3]), [0, 0], [True, True]),
        (np.log([8, 0.25, 100]), [0, 0, 0], [True, True, False]),
        (np.log([0.125]), [0], [True]),
    ]
    coefficient, inside = corrected(samples, True, level=level, mode="mask", low=0.5, high=4.0)
    ws = [[3, 3], [8, 0.25, 0], [0.125]]
    for ours, w, keep in zip(coefficient, ws, kept, strict=True):
        assert ours == pytest.approx([value * keep for value in w])
    assert inside == [[kept[0]] * 2, [kept[1], kept[1], False], [kept[2]]]


def test_a_product_beyond_every_float_is_outside_and_no_error():
    samples = [([0.0] * 60, [-30.0] * 60, [True] * 60), ([-30.0] * 60, [0.0] * 60, [True] * 60)]
    coefficient, inside = corrected(samples, True, level="seq", mode="mask", low=0.5, high=5.0)
    assert not np.any(coefficient) and not np.any(inside)


def test_the_coefficient_carries_no_gradient():
    old = torch.zeros(2, requires_grad=True)
    one = torch.zeros(2, dtype=torch.int64)
    settings = {"mode": "clip", "low": 0.5, "high": 2.0}
    coefficient, _ = correction(old, torch.zeros(2), torch.ones(2).bool(), one, level="token", **settings)
    assert not coefficient.requires_grad


@pytest.mark.parametrize("position", [0, 1])
def test_a_nan_is_an_error_that_names_its_tensor(position):
    pair = [torch.zeros(2), torch.zeros(2)]
    one = torch.zeros(2, dtype=torch.int64)
    pair[position] = torch.tensor([math.nan, 0.0])
    name = ("old_logprobs", "rollout_logprobs")[position]
    with pytest.raises(TrainingError, match=f"^{name} holds 1 NaN"):
        correction(*pair, torch.ones(2).bool(), one, level="geo", mode="mask", low=0.5, high=5.0)


def divergence(gating, old, rollout):
    """In float64, with 0 ln 0 = 0 and logarithms of at most 30."""
    p = math.exp(rollout)
    q = math.exp(old)
    if gating == "tv":
        return abs(p - q)
    first = p * min(max(rollout - old, -30.0), 30.0)
    rest_p = -math.expm1(rollout)
    rest_q = -math.expm1(old)
    if rest_p == 0:
        return first
    return first + rest_p * (30.0 if rest_q == 0 else min(max(math.log(rest_p / rest_q), -30.0), 30.0))


certain = st.sampled_from([0.0, -1e-9, -1e-17, -50.0])
any_token = st.one_of(token, st.tuples(certain | near, certain | near, st.booleans()))
any_sample = st.lists(any_token, min_size=1, max_size=12).map(lambda tokens: tuple(zip(*tokens, strict=True)))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("level", ["token", "seq"])
@pytest.mark.parametrize("gating", GATINGS)
@given(st.lists(any_sample, min_size=1, max_size=5), st.floats(0, 0.02), st.floats(0.03, 0.7))
def test_every_gate_matches_the_reference(gating, level, packed, samples, low, high):
    coefficient, inside = corrected(samples, packed, level=level, mode="mask", low=low, high=high, gating=gating)
    for ours, kept, (old, rollout, mask) in zip(coefficient, inside, samples, strict=True):
        statistics = [divergence(gating, *pair) for pair in zip(old, rollout, strict=True)]
        if level == "seq":
            trained = [x for x, m in zip(statistics, mask, strict=True) if m]
            statistics = [sum(trained) / max(1, len(trained))] * len(old)
        # Within rounding of a bound either way is right; a bound of 0 has no other side.
        bounds = [bound for bound in (low, high) if bound]
        assume(not any(math.isclose(x, b, rel_tol=1e-6, abs_tol=1e-12) for x in statistics for b in bounds))
        expected = [m and low <= max(x, 0.0) <= high for x, m in zip(statistics, mask, strict=True)]
        w = np.exp(np.clip(np.subtract(old, rollout), -30, 30))
        np.testing.assert_allclose(ours, np.where(expected, w, 0), rtol=1e-6, atol=1e-6)
        assert kept == expected


def test_the_gates_by_hand():
    # p = 1/2, q = 1/4: KL = 1/2 ln 2 + 1/2 ln((1/2) / (3/4)) = 1/2 ln(4/3) = 0.14384; tv 1/4.
    # p = q = 0.3: 0. p = 1, q = 1/2: ln 2 = 0.69315 and tv 1/2. p = 0.8, q = 1: 0.8 ln 0.8 + 0.2 * 30 = 5.82, tv 0.2.
    rollout, old = (torch.tensor(x, dtype=torch.float64).log() for x in ([0.5, 0.3, 1.0, 0.8], [0.25, 0.3, 0.5, 1.0]))
    statistics = {
        "binary_kl": [math.log(4 / 3) / 2, 0, math.log(2), 0.8 * math.log(0.8) + 6],
        "tv": [1 / 4, 0, 1 / 2, 0.2],
    }
    for gating, expected in statistics.items():
        assert GATINGS[gating](rollout, old).tolist() == pytest.approx(expected, abs=1e-12)
    mask = torch.ones(4).bool()
    one = torch.zeros(4).long()
    settings = {"mode": "mask", "low": 0.0}
    run = lambda **more: correction(old, rollout, mask, one, **settings, **more)[0].tolist()  # noqa: E731
    w = [0.5, 1, 0.5, 1.25]
    assert run(level="token", gating="binary_kl", high=0.2) == pytest.approx([0.5, 1, 0, 0])
    assert run(level="token", gating="tv", high=0.3) == pytest.approx([0.5, 1, 0, 1.25])
    # The mean of 1/4, 0, 1/2, 1/5 is 0.2375.
    assert run(level="seq", gating="tv", high=0.24) == pytest.approx(w)
    assert run(level="seq", gating="tv", high=0.23) == [0, 0, 0, 0]


@pytest.mark.parametrize("gating", GATINGS)
def test_a_gate_is_finite_and_keeps_what_agrees_at_any_probability(gating):
    edges = [0.0, -1e-17, -1e-8, -0.3, -1.0, -29.0, -800.0]
    pairs = torch.tensor([(a, b) for a in edges for b in edges], dtype=torch.float64).T
    assert GATINGS[gating](*pairs).isfinite().all() and (GATINGS[gating](*pairs) >= 0).all()
    # A float32 log-softmax may round to above 0, where 1 - p has no logarithm.
    same = torch.tensor([*edges, 6e-8, -0.1, -0.7], dtype=torch.float32)
    everything = torch.ones(len(same)).bool(), torch.zeros(len(same)).long()
    settings = {"level": "token", "mode": "mask", "low": 0.0, "high": 0.1, "gating": gating}
    assert correction(same, same, *everything, **settings)[0].tolist() == [1] * len(same)
    # p = 0: nothing of it was sampled.
    impossible = torch.tensor([-math.inf])
    likely = torch.tensor([-0.5])
    for pair in (impossible, likely), (likely, impossible):
        coefficient, _ = correction(*pair, everything[0][:1], everything[1][:1], **settings)
        assert coefficient.tolist() == [0]


def test_binary_kl_is_precise_for_nearly_equal_and_nearly_certain_tokens():
    # 1 - p = 1e-13 and 1 - q = 1e-10: -1e-13 + 1e-10 + 1e-13 ln 1e-3 = 1e-10 - 1e-13 (1 + 6.907755).
    certain = tuple(torch.tensor([x], dtype=torch.float64) for x in (-1e-13, -1e-10))
    assert GATINGS["binary_kl"](*certain).item() == pytest.approx(1e-10 - 7.907755e-13, rel=1e-9, abs=0)
    # float32 log-probs around ln 1/2 that differ by x: (p / (1-p)) x^2 / 2 = x^2 / 2, at most 5e-9: float64 inside.
    rollout = torch.full((1001,), -math.log(2))
    old = rollout + torch.linspace(-1e-4, 1e-4, 1001)
    everything = (torch.ones(1001).bool(), torch.zeros(1001).long())
    settings = {"level": "token", "mode": "mask"}
    kept = correction(old, rollout, *everything, gating="binary_kl", low=0.0, high=1e-9, **settings)[1]
    x = (old.double() - rollout.double()).abs()
    assert kept[x < 0.99 * 2e-9**0.5].all() and not kept[x > 1.01 * 2e-9**0.5].any()
    # A difference of one float64 rounding leaves a KL of -1e-17 unless it is held at 0.
    rollout = torch.linspace(-3, -0.01, 1001).double()
    old = rollout * (1 + 2e-16)
    assert correction(old, rollout, *everything, gating="binary_kl", low=0.0, high=1e-9, **settings)[1].all()


@pytest.mark.parametrize("gating", ["ratio", *GATINGS])
@pytest.mark.parametrize("level", ["token", "seq"])
def test_a_sample_that_is_not_trained_has_no_coefficient(gating, level):
    samples = [([-1.0, -2.0], [-1.0, -2.0], [False, False]), ([-1.0], [-1.0], [True])]
    settings = {"level": level, "mode": "mask", "low": 0.0, "high": 2.0, "gating": gating}
    assert corrected(samples, True, **settings) == [[[0, 0], [1]], [[False, False], [True]]]


@pytest.mark.parametrize(("settings", "words"), [
    (("token", "mask", "ratio"), "mask(w, 0, 0.5)"),
    (("token", "trunc", "ratio"), "trunc(w, 0, 0.5)"),
    (("seq", "mask", "ratio"), "w if 0 <= exp(sum of log w over the sample) <= 0.5 else 0"),
    (("geo", "mask", "ratio"), "w if 0 <= exp(mean of log w over the sample) <= 0.5 else 0"),
    (("token", "mask", "tv"), "w if 0 <= tv(exp(rollout), exp(old)) <= 0.5 else 0"),
    (("seq", "mask", "binary_kl"), "w if 0 <= mean of binary_kl(exp(rollout), exp(old)) over the sample <= 0.5 else 0"),
])  # fmt: skip
def test_the_coefficient_in_words(settings, words):
    assert describe(*settings, 0.0, 0.5) == words


def test_every_gate_that_can_be_chosen_exists():
    assert {"ratio", *GATINGS} == set(AdvantageConfig.__annotations__["is_correction_gating"].__args__)
