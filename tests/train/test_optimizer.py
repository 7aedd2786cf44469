"""The learning rate by hand, and what the optimizer decays."""

import pytest
import torch

from molt.config import AdamConfig, OptimizerConfig
from molt.train.optimizer import build_optimizer, build_scheduler, lr_factor


def factors(scheduler, steps, **settings):
    given = {"warmup_steps": 2, "total_steps": 10, "min_lr_ratio": 0.1} | settings
    total_steps = given["total_steps"]
    config = OptimizerConfig(
        lr_scheduler=scheduler,
        lr_warmup_ratio=given["warmup_steps"] / max(1, total_steps),
        min_lr_ratio=given["min_lr_ratio"],
    )
    return [lr_factor(step, config, total_steps) for step in steps]


@pytest.mark.parametrize("scheduler", ["constant", "linear", "cosine", "polynomial", "inverse_sqrt", "wsd"])
def test_warm_up_starts_above_zero_and_reaches_the_peak(scheduler):
    assert factors(scheduler, [0, 1, 2, 3], warmup_steps=4, total_steps=100) == [0.25, 0.5, 0.75, 1.0]


# Steps 1, 5 and 9 of 10 with 2 warm-up steps: p = (s + 1 - 2) / 8 = 0, 1/2, 1.
@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("constant", [1, 1, 1]),
        ("linear", [1, 0.1 + 0.9 * 0.5, 0.1]),
        ("cosine", [1, 0.1 + 0.9 * 0.5, 0.1]),  # (1 + cos(pi / 2)) / 2 = 1/2
        ("polynomial", [1, 0.1 + 0.9 * 0.25, 0.1]),  # (1/2)^2
        ("inverse_sqrt", [1, 0.1 + 0.9 * (2 / 6) ** 0.5, 0.1 + 0.9 * (2 / 10) ** 0.5]),
        ("wsd", [1, 1, 0.1]),
    ],
)
def test_shapes(scheduler, expected):
    assert factors(scheduler, [1, 5, 9]) == pytest.approx(expected)


def test_wsd_is_stable_for_four_fifths_then_falls_in_a_line():
    # No warm-up to speak of, 101 steps: p = s / 100.
    got = factors("wsd", [79, 80, 90, 100], warmup_steps=1, total_steps=101, min_lr_ratio=0.0)
    assert got == pytest.approx([1.0, 1.0, 0.5, 0.0])


def test_past_the_end_and_without_steps_it_stays_in_range():
    assert factors("cosine", [20]) == pytest.approx([0.1])
    assert factors("linear", [0], warmup_steps=1, total_steps=0) == [1.0]


def test_the_scheduler_sets_the_rate_of_the_first_step():
    model = torch.nn.Linear(2, 2)
    config = OptimizerConfig(adam=AdamConfig(lr=1.0, weight_decay=0.1), lr_warmup_ratio=0.4)
    optimizer = build_optimizer(model, config)
    scheduler = build_scheduler(optimizer, config, total_steps=10)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_vectors_are_not_decayed_and_frozen_parameters_are_left_out():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 1))
    model[2].requires_grad_(False)
    decayed, plain = build_optimizer(model, OptimizerConfig(adam=AdamConfig(weight_decay=0.1))).param_groups
    assert [id(p) for p in decayed["params"]] == [id(model[0].weight)] and decayed["weight_decay"] == 0.1
    assert {id(p) for p in plain["params"]} == {id(model[0].bias), id(model[1].weight), id(model[1].bias)}
    assert plain["weight_decay"] == 0.0
