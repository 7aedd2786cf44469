"""The proofs see every change; and say which tensor, engine or number it was."""

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.errors import PublicationError
from molt.publish.proof import (
    Digests,
    Receipt,
    check_digests,
    check_in_use,
    check_probe,
    check_transport,
    checksum,
    combine,
    compare_probe,
)
from molt.types import Metric

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool]
CHUNK = 1 << 18


def bits(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bit patterns of that type."""
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    raw = np.random.default_rng(seed).integers(0, high, count * size).astype(np.uint8)
    return torch.from_numpy(raw).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_flipped_bit_shows(dtype):
    tensor = bits(13, dtype)
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before and 0 <= before < 2**64
    raw = tensor.view(torch.uint8)
    for byte in range(len(raw)):
        for bit in (0,) if dtype is torch.bool else range(8):
            raw[byte] ^= 1 << bit
            assert checksum(tensor) != before, (byte, bit)
            raw[byte] ^= 1 << bit
    assert checksum(tensor) == before


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 300), st.sampled_from([torch.float32, torch.bfloat16, torch.int8]), st.data())
def test_swapped_elements_show(count, dtype, data):
    tensor = bits(count, dtype, seed=count)
    i, j = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, count - 1))
    swapped = tensor.clone()
    swapped[i], swapped[j] = tensor[j].clone(), tensor[i].clone()
    raw = [t.view(torch.uint8) for t in (tensor, swapped)]
    assert (checksum(swapped) == checksum(tensor)) == torch.equal(*raw)


def test_dtype_and_shape_show_even_where_all_bits_are_zero():
    zeros = [
        torch.zeros(shape, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)
        for shape in ((4, 6), (6, 4), (24,), (23,))
    ]
    assert len({checksum(tensor) for tensor in zeros}) == len(zeros)


def test_layout_in_memory_does_not_show():
    tensor = bits(24, torch.bfloat16).view(4, 6)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    assert checksum(torch.cat([tensor, tensor])[4:]) == checksum(tensor)
    assert checksum(tensor.t()) == checksum(tensor.t().contiguous()) != checksum(tensor)
    assert checksum(torch.nn.Parameter(tensor)) == checksum(tensor)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (0,), (7, 5, 3), (255,)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float32])
def test_odd_sizes(shape, dtype):
    assert checksum(torch.zeros(shape, dtype=dtype)) != checksum(torch.ones(shape, dtype=dtype)) or 0 in shape


def test_across_a_chunk_boundary():
    tensor = bits(CHUNK + 3, torch.int8)
    words = tensor.view(torch.uint8).to(torch.int64)
    first = int((words[:CHUNK] * torch.arange(1, CHUNK + 1)).sum())
    second = sum((i + 1) * int(word) for i, word in enumerate(words[CHUNK:]))  # positions start again
    start = zlib.crc32(b"torch.int8 [262147]")
    mix = 6364136223846793005
    assert checksum(tensor) == ((start * mix + first) * mix + second) % 2**64
    for i, j in ((0, CHUNK), (CHUNK - 1, CHUNK), (5, CHUNK + 2)):  # the first pair has the same position in its chunk
        tensor[i], tensor[j] = 1, 2
        before = checksum(tensor)
        tensor[i], tensor[j] = 2, 1
        assert checksum(tensor) != before


def test_combine_depends_on_names_and_values_and_not_on_their_order():
    sums = {"a": 1, "b": 2**64 - 1}
    assert combine(sums) == combine(dict(reversed(sums.items())))
    others = [{"a": 2**64 - 1, "b": 1}, {"a": 1, "c": 2**64 - 1}, {"a": 1}, {"a": 1, "b": 0}, {}]
    assert len({combine(s) for s in [sums, *others]}) == 6


SENT = {"embed.weight": 1, "head.weight": 2, "norm.weight": 3}


def receipt(version="4", digest=0, **changed):
    received = {name: value for name, value in (SENT | changed).items() if value is not None}
    return Receipt(version, received, digest)


def test_what_arrived_as_sent_passes():
    check_transport(SENT, [receipt(), receipt()], 4)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (receipt(**{"head.weight": None}), r"tensor 'head.weight' was sent and did not arrive \(1 missing\)"),
        (receipt(**{"head.weight": None, "lm.weight": 2}), r"tensor 'head.weight' was sent and did not arrive"),
        (receipt(**{"lm.weight": 2}), r"tensor 'lm.weight' arrived and was never sent \(1 unknown\)"),
        (receipt(**{"norm.weight": 9}), r"tensor 'norm.weight' arrived with other bytes \(checksum 0+9, sent 0+3\)"),
        (receipt(version="3"), r"echoes version '3'.*Another process may be publishing"),
        (receipt(version="default"), r"echoes version 'default'"),
        (Receipt("4", {}, 0), r"tensor 'embed.weight' was sent and did not arrive \(3 missing\)"),
    ],
)
def test_what_did_not_arrive_as_sent_is_named(bad, message):
    with pytest.raises(PublicationError, match=f"engine worker 1, version 4: .*{message}"):
        check_transport(SENT, [receipt(), bad], 4)


def test_the_engine_that_holds_other_weights_is_named():
    # 3 engines of 2 workers: ranks of one engine hold different shards.
    good = [receipt(digest=d) for d in (10, 20, 10, 20, 10, 20)]
    check_digests(good, 2)
    bad = [*good[:5], receipt(digest=21)]
    with pytest.raises(
        PublicationError, match=r"engine 2 holds other weights than engine 0 \(rank 1: 0+15 against 0+14"
    ):
        check_digests(bad, 2)
    check_digests([receipt(digest=5)], 1)
    with pytest.raises(PublicationError, match="engine 1 holds"):
        check_digests(good, 1)


@pytest.mark.parametrize(("before", "now"), [((5, 5), (6, 6)), ((5, 7), (6, 8)), ((), ())])
def test_weights_that_changed_with_the_trainers_are_in_use(before, now):
    check_in_use(Digests(sent=1, held=before), Digests(sent=2, held=now))


def test_an_engine_that_still_holds_what_it_held_is_named():
    with pytest.raises(PublicationError, match=r"engine worker 1: .*received, not in use.*\(digest 0+7\).*old policy"):
        check_in_use(Digests(sent=1, held=(5, 7)), Digests(sent=2, held=(6, 7)))
    same = Digests(sent=1, held=(5, 7))
    check_in_use(same, same)  # published again without a step: nothing has to change


def test_the_probe_by_hand():
    trainer = [np.array([0.0, -1.0, -2.0], np.float32), np.array([0.0, -3.0], np.float32)]
    engine = [np.array([9.0, -1.5, -2.0], np.float32), np.array([0.0, -2.75], np.float32)]
    # The first of each is no log-prob. |0.5|, |0|, |0.25|: max 0.5, mean 0.75 / 3 = 0.25
    metrics = compare_probe(trainer, engine)
    assert metrics == {"mismatch/abs_max": Metric(0.5), "mismatch/abs_mean": Metric(0.75, 3)}
    for bound, use_max, passes in ((0.5, True, True), (0.4, True, False), (0.26, False, True), (0.24, False, False)):
        if passes:
            check_probe([metrics], bound=bound, use_max=use_max, version=7)
        else:
            with pytest.raises(
                PublicationError, match=r"at engine 0, version 7, above train.parity_bound.*received, not in use"
            ):
                check_probe([metrics], bound=bound, use_max=use_max, version=7)


@pytest.mark.parametrize("use_max", [True, False])
@pytest.mark.parametrize("side", [0, 1])
def test_nan_disagrees_with_everything(use_max, side):
    pair = [[np.array([0.0, -1.0], np.float32)], [np.array([0.0, -1.0], np.float32)]]
    pair[side][0][1] = np.nan
    with pytest.raises(PublicationError, match="is nan at engine 0, version 0"):
        check_probe([compare_probe(*pair)], bound=1e9, use_max=use_max, version=0)
