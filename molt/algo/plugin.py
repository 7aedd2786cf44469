"""An estimator or a policy loss by its name: a row of a table, or `FILE.py:function` of the user's.

A function of the user's is called once on a few numbers when it is loaded, and what it returns is checked at every
call: a wrong shape would be broadcast, and a NaN would reach the weights.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from molt.algo.advantage import ADVANTAGES, Estimator, GroupContext
from molt.algo.loss import LOSSES, PolicyLoss
from molt.errors import ConfigError, did_you_mean
from molt.user_module import load_module

NEEDS = ("ref_logprobs", "values")
GROUP, TOKEN = "def f(rewards, groups, ctx)", "def f(reward, mask, *, kl, values, gamma, lam)"
LOSS = "def f(logprobs, old_logprobs, advantages, mask, *, low, high, dual_clip)"


@dataclass(frozen=True)
class UserFunction:
    """What the setting `flag` names."""

    flag: str
    name: str
    function: Callable[..., Any]

    def error(self, wrong: str, fix: str) -> ConfigError:
        return ConfigError(f"`{self.flag}` (={self.name}) {wrong}, so nothing can be trained with it. {fix}.")

    @property
    def formula(self) -> str:
        return str(getattr(self.function, "formula", self.name.rpartition(":")[2]))

    def takes(self, *args: Any, **kwargs: Any) -> bool:
        try:
            inspect.signature(self.function).bind(*args, **kwargs)
        except (TypeError, ValueError):  # ValueError: a function of C has no signature
            return False
        return True

    def __call__(self, like: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What it returns. Raises `ConfigError` unless those are finite floats of the shape of `like`."""
        try:
            found = self.function(*args, **kwargs)
        except Exception as error:  # the user's function may raise anything
            raise self.error(f"raises {error!r}", "Call it on small tensors to see the traceback") from error
        is_tensor = isinstance(found, Tensor)
        if not is_tensor or not found.is_floating_point() or found.shape != like.shape:
            what = f"{found.dtype} of shape {list(found.shape)}" if is_tensor else type(found).__name__
            raise self.error(f"returns {what}", f"Return a tensor of floats of shape {list(like.shape)}")
        if wrong := int((~found.isfinite()).sum()):
            raise self.error(f"returns NaN or infinity for {wrong} of {found.numel()}", "Look for a division by 0")
        return found


def load_estimator(name: str) -> Estimator:
    """A row of `ADVANTAGES`, or `FILE.py:function`. Raises `ConfigError` with what is wrong and the fix.

    A function like `GROUP` is a group estimator, one like `TOKEN` a token estimator; what they are given and return is
    in `Estimator`. Attributes that it may have: `whiten` (default False), `formula` (a text for the header) and, of a
    token estimator, `needs` (some of `NEEDS`).
    """
    return ADVANTAGES[name] if name in ADVANTAGES else _user_estimator(name)


@cache
def _user_estimator(name: str) -> Estimator:
    user = _load("algo.advantage.estimator", name, ADVANTAGES)
    # The second group has equal rewards: a division by their deviation shows.
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    mask, half = torch.tensor([True, False, True, True]), rewards.new_full((4,), 0.5)
    level, given, named = "group", (rewards, groups, GroupContext(rewards.clone(), groups + 1, ~mask)), {}
    if not user.takes(*given):
        level, given, named = "token", (1.0, mask), {"kl": half, "values": half.clone(), "gamma": 1.0, "lam": 1.0}
    if not user.takes(*given, **named):
        raise user.error("takes other arguments than it would get", f"Write `{GROUP}` or, by token, `{TOKEN}`")
    needs, known = getattr(user.function, "needs", ()), NEEDS if level == "token" else ()
    if not isinstance(needs, tuple | list) or not set(needs) <= set(known):
        raise user.error(f"needs {needs!r}", f"A {level} estimator may have `needs` out of {known}")

    def by_group(rewards: Tensor, groups: Tensor, ctx: GroupContext | None = None) -> Tensor:
        return user(rewards, rewards, groups, ctx).double()

    def by_token(reward: float, mask: Tensor, **scalars: Any) -> Tensor:
        return torch.where(mask, user(mask, reward, mask, **scalars), 0.0).float()

    fn = by_group if level == "group" else by_token
    fn(*given, **named)
    return Estimator(level, getattr(user.function, "whiten", False), fn, user.formula, tuple(needs))


def load_loss(name: str) -> PolicyLoss:
    """A row of `LOSSES`, or `FILE.py:function` like `LOSS`. Raises `ConfigError` with what is wrong and the fix.

    The function returns the loss of every token, of the shape [B, T] of `logprobs` and with a gradient to them. It may
    have the attribute `formula` (a text for the header). None of its tokens counts as clipped.
    """
    return LOSSES[name] if name in LOSSES else _user_loss(name)


@cache
def _user_loss(name: str) -> PolicyLoss:
    user = _load("algo.loss", name, LOSSES)
    logprobs = torch.tensor([[-0.5, -1.0, 0.0, -2.0], [-0.1, -3.0, -1.5, 0.0]], requires_grad=True)
    old, advantages = logprobs.detach() - 0.05, torch.tensor([[1.0, 1.0, 0.0, 1.0], [-0.5, -0.5, -0.5, 0.0]])
    given, scalars = (logprobs, old, advantages, advantages != 0), {"low": 0.2, "high": 0.2, "dual_clip": None}
    if not user.takes(*given, **scalars):
        raise user.error("takes other arguments than it would get", f"Write `{LOSS}`; `**_` will do for the last three")

    def fn(
        logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, segments: Tensor, **scalars: Any
    ) -> tuple[Tensor, Tensor]:
        return user(logprobs, logprobs, old, advantages, mask, **scalars), torch.zeros_like(mask)

    loss, _ = fn(*given, segments=torch.tensor([[0] * 4, [1] * 4]), **scalars)
    gradient = torch.autograd.grad(loss.sum(), logprobs, allow_unused=True)[0] if loss.requires_grad else None
    size = 0.0 if gradient is None else float(gradient.abs().sum())
    if not 0 < size < inf:
        raise user.error(f"gives logprobs a gradient of size {size}", "Use them without detach() and without 0 / 0")
    return PolicyLoss(fn, user.formula.replace("{", "{{").replace("}", "}}"))


def absolute(name: str) -> str:
    """The same name in a process that started elsewhere."""
    path, _, function = name.rpartition(":")
    return f"{Path(path).resolve()}:{function}" if path else name


def _load(flag: str, name: str, known: Iterable[str]) -> UserFunction:
    path, _, function = name.rpartition(":")
    if not path:
        raise ConfigError(
            f"`{flag}` (={name}) is none of molt's, so nothing was started.{did_you_mean(name, known)} "
            f"Use one of: {', '.join(known)}, or your own as FILE.py:function."
        )
    found = {key: value for key, value in vars(load_module(path, flag)).items() if callable(value)}
    if function not in found:
        near = did_you_mean(function, found)
        raise ConfigError(f"`{flag}` (={name}) names no function of {path}, so nothing was started.{near} Correct it.")
    return UserFunction(flag, name, found[function])
