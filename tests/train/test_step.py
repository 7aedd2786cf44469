"""What an optimizer step promises: metrics, clipping, dummies, and the two refusals."""

import pytest
import torch

from molt.errors import TrainingError
from molt.train.sft import negative_log_likelihood
from molt.train.step import accumulate, optimizer_step
from molt.types import Metric
from tests.train.ranks import micro_batches_of, run_ranks, step_batch, trainer, whole


def weights_of(model):
    return [whole(p) for p in model.parameters()]


def step(mesh, parts, loss_fn=negative_log_likelihood, max_norm=0.0):
    return optimizer_step(*parts, micro_batches_of(mesh, step_batch(), 3, True), loss_fn, mesh=mesh, max_norm=max_norm)


def test_metrics_of_micro_batches_are_merged(tiny, mesh):
    def loss_fn(model, m):
        loss, _ = negative_log_likelihood(model, m)
        return loss, {"n": Metric(1.0, 2.0), "n_max": Metric(float(m.batch.max_seqlen))}

    metrics = step(mesh, trainer(tiny, mesh), loss_fn)
    assert metrics["n"] == Metric(3.0, 6.0)  # 7 sequences in micro-batches of 3: three of them
    assert metrics["n_max"].total == 37


def test_clipping_scales_the_gradient_to_the_norm(tiny, mesh):
    model, optimizer, scheduler = trainer(tiny, mesh)
    accumulate(model, optimizer, micro_batches_of(mesh, step_batch(), 7, True), negative_log_likelihood)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    before = weights_of(model)
    metrics = step(mesh, (model, optimizer, scheduler), max_norm=norm / 2)
    assert metrics["train/grad_norm"].total == pytest.approx(norm, rel=1e-5)  # as it was before clipping
    moved = torch.nn.utils.get_total_norm([a - b for a, b in zip(before, weights_of(model), strict=True)])
    assert moved.item() == pytest.approx(norm / 2, rel=1e-4)


def test_a_dummy_micro_batch_changes_nothing(tiny, mesh):
    grads = []
    for extra in ([], [None, None]):
        model, optimizer, _ = trainer(tiny, mesh)
        loss, _ = accumulate(
            model, optimizer, [*micro_batches_of(mesh, step_batch(), 7, True), *extra], negative_log_likelihood
        )
        grads.append((loss, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_loss_is_refused_and_leaves_the_weights(tiny, mesh, value):
    parts = trainer(tiny, mesh)
    before = weights_of(parts[0])

    def loss_fn(model, m):
        loss, metrics = negative_log_likelihood(model, m)
        return loss * value, metrics

    with pytest.raises(TrainingError, match=r"the step was not taken.*embed_tokens"):
        step(mesh, parts, loss_fn)
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(parts[0]), strict=True))
    assert all(p.grad is None for p in parts[0].parameters())
    assert step(mesh, parts)["train/lr"].total > 0  # and training can go on


def test_a_step_that_moves_no_master_weight_is_refused(tiny, mesh):
    too_small = trainer(tiny, mesh, lr=1e-50)
    with pytest.raises(TrainingError, match="moved no master weight"):
        step(mesh, too_small)
    model, _, _ = trainer(tiny, mesh)
    of_copies = torch.optim.AdamW([p.detach().clone().requires_grad_() for p in model.parameters()])
    scheduler = torch.optim.lr_scheduler.ConstantLR(of_copies, factor=1.0)
    with pytest.raises(TrainingError, match="moved no master weight"):
        step(mesh, (model, of_copies, scheduler))


def test_without_rate_or_gradient_nothing_has_to_move(tiny, mesh):
    step(mesh, trainer(tiny, mesh, lr=0.0))

    def no_gradient(model, m):
        loss, metrics = negative_log_likelihood(model, m)
        return loss * 0, metrics

    step(mesh, trainer(tiny, mesh, lr=1e-50), no_gradient)


def refusals(mesh, path):
    """Both refusals where only one rank is to blame: its loss is NaN; its shard alone moves."""
    parts = trainer(path, mesh)

    def one_nan(model, m):
        loss, metrics = negative_log_likelihood(model, m)
        return loss * (float("nan") if mesh.rank == 1 else 1.0), metrics

    try:
        step(mesh, parts, one_nan)
        return "no error"
    except TrainingError as error:
        return str(error)


@pytest.mark.processes
def test_every_rank_refuses_when_one_loss_is_not_finite(tiny, tmp_path):
    for message in run_ranks(refusals, 2, tmp_path, tiny):
        assert "the step was not taken" in message
