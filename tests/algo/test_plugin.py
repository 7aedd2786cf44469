"""Estimators and losses of the user's: what they may be, and every way in which they are refused at the start."""

import sys
from pathlib import Path

import pytest
import torch

from molt.algo.advantage import ADVANTAGES, GroupContext
from molt.algo.loss import LOSSES
from molt.algo.plugin import load_estimator, load_loss
from molt.errors import ConfigError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python" / "algorithms"
GROUP = "def f(rewards, groups, ctx): return "
TOKEN = "def f(reward, mask, *, kl, values, gamma, lam): return "
LOSS = "def f(logprobs, old_logprobs, advantages, mask, **scalars): return "


@pytest.fixture
def write(tmp_path):
    """Write a plug-in; the name that a setting would have."""

    def file(text: str, function: str = "f") -> str:
        (tmp_path / "mine.py").write_text(f"import torch\n{text}\n")
        return f"{tmp_path / 'mine.py'}:{function}"

    return file


def context(n: int) -> GroupContext:
    zeros = torch.zeros(n, dtype=torch.int64)
    return GroupContext(zeros.double(), zeros, zeros.bool())


def test_a_name_of_molt_is_its_row():
    assert all(load_estimator(name) is row for name, row in ADVANTAGES.items())
    assert all(load_loss(name) is row for name, row in LOSSES.items())


def test_the_median_example_by_hand():
    estimator = load_estimator(f"{EXAMPLES / 'group_median.py'}:group_median")
    # Group 4: median of 0, 1, 5 is 1. Group 2: of 1, 3 it is 2.
    rewards = torch.tensor([0.0, 1.0, 1.0, 5.0, 3.0], dtype=torch.float64)
    groups = torch.tensor([4, 2, 4, 4, 2])
    assert estimator.fn(rewards, groups, context(5)).tolist() == [-1, -1, 0, 4, 1]
    assert (estimator.level, estimator.whiten, estimator.needs) == ("group", True, ())
    assert estimator.formula == "R - median(group)"


def test_the_asymmetric_example_by_hand():
    loss = load_loss(f"{EXAMPLES / 'asymmetric_reinforce.py'}:asymmetric_reinforce")
    old = torch.tensor([[-1.0, -1.0, -1.0]])
    logprobs = (old + torch.tensor([[2.0, 0.5, 0.25]]).log()).requires_grad_()
    advantages = torch.tensor([[3.0, -1.0, -2.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    found, clipped = loss.fn(logprobs, old, advantages, mask, mask.long(), low=0.2, high=0.2)
    found.sum().backward()
    # The gradient is -w A: w is 1 for the good token, else the ratio, at most 1.
    assert logprobs.grad.tolist() == [pytest.approx([-3.0, 0.5, 0.5])]
    assert clipped.shape == mask.shape and not clipped.any()
    assert loss.formula.format(low=0.2, high=0.2, dual_clip=None) == "-(1 if A >= 0 else min(r, 1)) A logprob"


def test_a_token_estimator_is_told_by_its_arguments(write):
    name = write(TOKEN + "reward - kl + 10 * values + 100 * gamma + 1000 * lam\nf.needs = ['values', 'ref_logprobs']")
    estimator = load_estimator(name)
    assert (estimator.level, estimator.whiten, estimator.needs) == ("token", False, ("values", "ref_logprobs"))
    assert estimator.formula == "f"
    mask = torch.tensor([True, False, True])
    kl = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    found = estimator.fn(5.0, mask, kl=kl, values=kl, gamma=1.0, lam=0.5)
    # 5 - 1 + 10 + 100 + 500; nothing outside the mask; 5 - 3 + 30 + 100 + 500.
    assert found.tolist() == [614, 0, 632] and found.dtype == torch.float32


def test_a_group_estimator_gives_float64(write):
    estimator = load_estimator(write(GROUP + "(rewards - ctx.scores.mean()).float()"))
    rewards = torch.tensor([2.0, 1.0], dtype=torch.float64)
    assert estimator.fn(rewards, torch.tensor([0, 0]), context(2)).dtype == torch.float64


SEQUENCES = """
from molt.algo.ratio import mean_of_sample


def f(logprobs, old_logprobs, advantages, mask, *, {segments}low, high, dual_clip):
    log_s = mean_of_sample(logprobs.detach() - old_logprobs, mask, segments).float()
    return -(logprobs - logprobs.detach() + log_s).exp() * advantages
"""


def test_a_loss_of_whole_sequences_gets_the_segments(write):
    loss = load_loss(write(SEQUENCES.format(segments="segments, ")))
    # Two sequences in one packed row: ratios 2, 8 and an untrained 100, then 3. s = sqrt(2 * 8) = 4, and 3.
    old = torch.full((1, 4), -5.0)
    logprobs = (old + torch.tensor([[2.0, 8.0, 100.0, 3.0]]).log()).requires_grad_()
    mask = torch.tensor([[True, True, False, True]])
    found, _ = loss.fn(logprobs, old, torch.ones(1, 4), mask, torch.tensor([[0, 0, 0, 1]]), low=0.2, high=0.2)
    assert found.tolist() == [pytest.approx([-4.0, -4.0, -4.0, -3.0], rel=1e-5)]


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ("*, low, high, dual_clip", None),
        ("*, low, high, dual_clip, segments=None", "segments"),
        ("segments, *, low, high, dual_clip", "segments"),
        ("**_", "_['segments']"),
    ],
)
def test_segments_reach_a_loss_that_takes_them(write, arguments, seen):
    look = f"SEEN.append({seen}); " if seen else ""
    name = write(f"SEEN = []\ndef f(logprobs, old_logprobs, advantages, mask, {arguments}): {look}return -logprobs")
    loss = load_loss(name)
    two = torch.zeros(1, 2, requires_grad=True)
    segments = torch.tensor([[0, 1]])
    loss.fn(two, two.detach(), two.detach(), two.bool(), segments, low=0.2, high=0.2)
    module = next(module for module in list(sys.modules.values()) if getattr(module, "__file__", "") == name[:-2])
    assert [each.tolist() for each in module.SEEN[-1:]] == ([[[0, 1]]] if seen else [])


def test_braces_in_the_formula_of_a_loss_are_text(write):
    loss = load_loss(write(LOSS + "-logprobs\nf.formula = '{low}'"))
    assert loss.formula.format(low=0.2, high=0.2, dual_clip=None) == "{low}"


def test_what_is_returned_is_checked_in_training_too(write):
    """A file that passes on the few numbers of the start, and fails on those of a batch."""
    estimator = load_estimator(write(GROUP + "rewards / rewards.sum()"))
    zeros = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ConfigError, match="returns NaN or infinity for 3 of 3"):
        estimator.fn(zeros, torch.tensor([0, 0, 0]), context(3))
    loss = load_loss(write(LOSS + "-logprobs if logprobs.shape[1] == 4 else -logprobs.mean()"))
    two = torch.zeros(1, 2)
    with pytest.raises(ConfigError, match=r"returns torch.float32 of shape \[\], .*of shape \[1, 2\]"):
        loss.fn(two, two, two, two.bool(), two.long(), low=0.2, high=0.2)


# text of the file, function, message
REFUSED = [
    (GROUP + "rewards", "g", r"names no function of .*mine.py"),
    ("def median(rewards, groups, ctx): return rewards", "medain", r"Did you mean 'median'\?"),
    ("f = 3", "f", "names no function of"),
    ("1 / 0", "f", "cannot be imported: ZeroDivisionError"),
    ("def f(rewards, groups): return rewards", "f", r"other arguments.*Write `def f\(rewards, groups, ctx\)`"),
    ("def f(reward, mask, *, gamma): return mask.float()", "f", r"by token, `def f\(reward, mask, \*, kl"),
    (GROUP + "rewards[:2]", "f", r"returns torch.float64 of shape \[2\], .*floats of shape \[4\]"),
    (GROUP + "rewards[:, None]", "f", r"shape \[4, 1\]"),
    (GROUP + "rewards.long()", "f", r"returns torch.int64 of shape \[4\]"),
    (GROUP + "rewards.tolist()", "f", r"returns list, .*floats of shape \[4\]"),
    (GROUP + "None", "f", "returns NoneType"),
    (GROUP + "ctx.score", "f", "raises AttributeError.*score.*small tensors"),
    # The rewards of one of the two groups are equal.
    (GROUP + "rewards / torch.stack([rewards[groups == g].std() for g in groups])", "f", "infinity for 2 of 4"),
    (
        GROUP + "rewards\nf.needs = ('values',)",
        "f",
        r"needs \('values',\).*group estimator may have `needs` out of \(\)",
    ),
    (TOKEN + "reward", "f", r"returns float, .*floats of shape \[4\]"),
    (TOKEN + "kl[mask]", "f", r"returns torch.float64 of shape \[3\]"),
    (TOKEN + "kl / 0", "f", "infinity for 4 of 4"),
    (TOKEN + "kl\nf.needs = ('value',)", "f", r"needs \('value',\).*'ref_logprobs', 'values'"),
    (TOKEN + "kl\nf.needs = 'values'", "f", "needs 'values'"),
    ("class f:\n    def __init__(self, rewards, groups, ctx): pass", "f", "returns f, "),
]
REFUSED_LOSSES = [
    (LOSS + "-logprobs", "g", "names no function of"),
    (
        "def f(logprobs, old_logprobs, advantages): return logprobs",
        "f",
        r"other arguments.*Write `def f\(logprobs, old",
    ),
    ("def f(logprobs, old_logprobs, advantages, mask): return logprobs", "f", r"`\*\*_` will do"),
    (LOSS + "-logprobs.mean()", "f", r"returns torch.float32 of shape \[\], .*floats of shape \[2, 4\]"),
    (LOSS + "-logprobs[mask]", "f", r"shape \[6\]"),
    (LOSS + "(-logprobs, mask)", "f", "returns tuple"),
    (LOSS + "mask", "f", "returns torch.bool"),
    (LOSS + "-advantages * logprobs.detach()", "f", "gives logprobs a gradient of size 0.0"),
    (LOSS + "-advantages * old_logprobs.clone().requires_grad_()", "f", "gives logprobs a gradient of size 0.0"),
    (LOSS + "logprobs * 0", "f", "gives logprobs a gradient of size 0.0"),
    # Where logprobs are 0 the root is too, but not its gradient.
    (LOSS + "torch.where(mask, (-logprobs).sqrt(), 0.0)", "f", "gives logprobs a gradient of size nan"),
    (LOSS + "advantages / logprobs", "f", "infinity for 2 of 8"),
    (LOSS + "scalars['clip'] * logprobs", "f", r"raises KeyError\('clip'\)"),
]


@pytest.mark.parametrize(
    ("load", "flag", "text", "function", "message"),
    [
        *((load_estimator, "algo.advantage.estimator", *row) for row in REFUSED),
        *((load_loss, "algo.loss", *row) for row in REFUSED_LOSSES),
    ],
)
def test_a_wrong_function_is_refused_when_it_is_loaded(write, load, flag, text, function, message):
    name = write(text, function)
    with pytest.raises(ConfigError, match=message) as refused:
        load(name)
    value = name.partition(":")[0] if "cannot be imported" in message else name
    assert str(refused.value).startswith(f"`{flag}` (={value}) ")


@pytest.mark.parametrize(("load", "flag"), [(load_estimator, "algo.advantage.estimator"), (load_loss, "algo.loss")])
def test_a_wrong_name(write, tmp_path, load, flag):
    write("")
    with pytest.raises(ConfigError, match=rf"`{flag}` \(=.*/mien.py\) is not a file: .* Did you mean 'mine.py'\?"):
        load(f"{tmp_path / 'mien.py'}:f")
    with pytest.raises(ConfigError, match=rf"`{flag}` \(=mine.py\) is none of molt's, .* as FILE.py:function"):
        load("mine.py")


def test_the_nearest_name_of_molt():
    with pytest.raises(ConfigError, match=r"\(=grop\).*Did you mean 'grpo'\? Use one of: reinforce, .*, gae"):
        load_estimator("grop")
    with pytest.raises(ConfigError, match=r"\(=gsop\).*Did you mean 'gspo'\? Use one of: ppo, gspo, cispo, gmpo"):
        load_loss("gsop")
