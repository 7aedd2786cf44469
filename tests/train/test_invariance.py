"""The same step batch gives the same gradient: any micro-batching, packed or padded, one rank or two."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from molt.train.step import dummy_batch
from tests.train.ranks import gradients, run_ranks, steps, trainer

# Sequences per micro-batch, packed, and tokens per micro-batch where there is no number of sequences. 7 sequences on
# two ranks are 3 and 4: sizes 1 and 3 leave a dummy. They have 37, 30, 20, 11, 9, 5 and 2 tokens: 35 leave the longest
# alone, with 12 nearly every one is.
LAYOUTS = [(7, True), (7, False), (1, False), (3, True), (3, False)]
LAYOUTS += [(None, packed, tokens) for packed in (True, False) for tokens in (12, 35)]


def assert_same_gradients(got, reference):
    assert got.keys() == reference.keys()
    for name, expected in reference.items():
        assert torch.linalg.norm(got[name] - expected) <= 1e-5 * torch.linalg.norm(expected), name


def assert_same_metrics(got, reference):
    first, *later = zip(got, reference, strict=True)
    assert first[0]["train/loss"] == pytest.approx(first[1]["train/loss"], abs=1e-6)
    assert first[0]["train/grad_norm"] == pytest.approx(first[1]["train/grad_norm"], rel=1e-5)
    for a, b in later:
        # Adam's first step has the size of the rate wherever the gradient is not 0, rounding errors included.
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-4)
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-3)
        assert a["train/lr"] == b["train/lr"] > 0


@pytest.mark.processes
def test_gradient_does_not_depend_on_layout_or_ranks(either, mesh, tmp_path):
    alone = [grads for _, grads in gradients(mesh, either, LAYOUTS)]
    for grads in alone[1:]:
        assert_same_gradients(grads, alone[0])
    for rank in run_ranks(gradients, 2, tmp_path, either, LAYOUTS):
        for _, grads in rank:
            assert_same_gradients(grads, alone[0])


@pytest.mark.processes
def test_ranks_may_have_different_numbers_of_micro_batches(tiny, mesh, tmp_path):
    first, second = run_ranks(gradients, 2, tmp_path, tiny, [(1, True)])
    assert first[0][0] != second[0][0]
    assert_same_gradients(first[0][1], gradients(mesh, tiny, [(7, False)])[0][1])


@pytest.mark.processes
def test_loss_and_norm_of_three_steps_do_not_depend_on_layout_or_ranks(tiny, mesh, tmp_path):
    layouts = [(7, False), (3, True), (None, False, 40)]
    alone = steps(mesh, tiny, layouts)
    for metrics in alone[1:]:
        assert_same_metrics(metrics, alone[0])
    for rank in run_ranks(steps, 2, tmp_path, tiny, layouts):
        for metrics in rank:
            assert_same_metrics(metrics, alone[0])


def kept_sharded(mesh, path):
    """Parameter types before and after a forward without backward."""
    model, _, _ = trainer(path, mesh)
    types = [{type(p) for p in model.parameters()}]
    with torch.no_grad():
        model(dummy_batch())
    return [*types, {type(p) for p in model.parameters()}]


@pytest.mark.processes
def test_a_forward_without_backward_leaves_the_parameters_sharded(tiny, tmp_path):
    for before, after in run_ranks(kept_sharded, 2, tmp_path, tiny):
        assert before == after == {DTensor}
