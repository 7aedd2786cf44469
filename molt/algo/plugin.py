"""An estimator or a policy loss by its name: a row of a table, or `FILE.py:function` of the user's.

A function of the user's is called once on a few numbers when it is loaded, and its result is checked at
every call: a wrong shape would be broadcast, and a NaN would reach the weights.
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

from molt.algo.advantage import ADVANTAGES, Estimator, GroupContext, Need
from molt.algo.loss import LOSSES, PolicyLoss
from molt.errors import ConfigError, did_you_mean
from molt.user_module import load_module

NEEDS: tuple[Need, ...] = ("ref_logprobs", "values")
"""A token estimator of the user's may name these in `needs`."""
GROUP = "def f(rewards, groups, ctx)"
TOKEN = "def f(reward, mask, *, kl, values, gamma, lam)"
LOSS = "def f(logprobs, old_logprobs, advantages, mask, *, segments, low, high, dual_clip)"


@dataclass(frozen=True)
class UserFunction:
    """The function that the setting `flag` names, with its result checked."""

    flag: str
    name: str
    function: Callable[..., Any]

    def error(self, problem: str, fix: str) -> ConfigError:
        return ConfigError(f"`{self.flag}` (={self.name}) {problem}, so nothing can be trained with it. {fix}.")

    @property
    def formula(self) -> str:
        _, _, function_name = self.name.rpartition(":")
        return str(getattr(self.function, "formula", function_name))

    def takes(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the function can be called with these arguments."""
        try:
            inspect.signature(self.function).bind(*args, **kwargs)
        except (TypeError, ValueError):  # ValueError: a function of C has no signature
            return False
        return True

    def call(self, shape: torch.Size, *args: Any, **kwargs: Any) -> Tensor:
        """Its result. Raises `ConfigError` unless it is a tensor of finite floats of this shape."""
        try:
            result = self.function(*args, **kwargs)
        except Exception as error:  # the user's function may raise anything
            raise self.error(f"raises {error!r}", "Call it on small tensors to see the traceback") from error

        floats = f"Return a tensor of floats of shape {list(shape)}"
        if not isinstance(result, Tensor):
            raise self.error(f"returns {type(result).__name__}", floats)
        if not result.is_floating_point() or result.shape != shape:
            raise self.error(f"returns {result.dtype} of shape {list(result.shape)}", floats)

        not_finite = int((~result.isfinite()).sum())
        if not_finite:
            raise self.error(
                f"returns NaN or infinity for {not_finite} of {result.numel()}",
                "Look for a division by 0",
            )
        return result


def load_estimator(name: str) -> Estimator:
    """A row of `ADVANTAGES`, or `FILE.py:function`. Raises `ConfigError` with the problem and the fix.

    A function like `GROUP` is a group estimator, one like `TOKEN` a token estimator; `Estimator` has their arguments
    and results. Attributes that it may have: `whiten` (default False), `formula` (a text for the header) and, of a
    token estimator, `needs` (some of `NEEDS`).
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    return _user_estimator(name)


@cache
def _user_estimator(name: str) -> Estimator:
    user = _load("algo.advantage.estimator", name, ADVANTAGES)

    # The second group has equal rewards: a division by their deviation shows.
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1])
    mask = torch.tensor([True, False, True, True])
    context = GroupContext(scores=rewards.clone(), lengths=groups + 1, truncated=~mask)
    if user.takes(rewards, groups, context):
        estimator = _group_estimator(user)
        estimator.fn(rewards, groups, context)
        return estimator

    per_token = {
        "kl": rewards.new_full((4,), 0.5),
        "values": rewards.new_full((4,), 0.5),
        "gamma": 1.0,
        "lam": 1.0,
    }
    if user.takes(1.0, mask, **per_token):
        estimator = _token_estimator(user)
        estimator.fn(1.0, mask, **per_token)
        return estimator

    raise user.error("takes other arguments than it would get", f"Write `{GROUP}` or, by token, `{TOKEN}`")


def _group_estimator(user: UserFunction) -> Estimator:
    def fn(rewards: Tensor, groups: Tensor, ctx: GroupContext | None = None) -> Tensor:
        return user.call(rewards.shape, rewards, groups, ctx).double()

    return Estimator(
        level="group",
        whiten=getattr(user.function, "whiten", False),
        fn=fn,
        formula=user.formula,
        needs=_needs(user, level="group", known=()),
    )


def _token_estimator(user: UserFunction) -> Estimator:
    def fn(reward: float, mask: Tensor, *, kl: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
        result = user.call(mask.shape, reward, mask, kl=kl, values=values, gamma=gamma, lam=lam)
        return torch.where(mask, result, 0.0).float()

    return Estimator(
        level="token",
        whiten=getattr(user.function, "whiten", False),
        fn=fn,
        formula=user.formula,
        needs=_needs(user, level="token", known=NEEDS),
    )


def _needs(user: UserFunction, *, level: str, known: tuple[Need, ...]) -> tuple[Need, ...]:
    needs = getattr(user.function, "needs", ())
    if not isinstance(needs, tuple | list) or not set(needs) <= set(known):
        raise user.error(f"needs {needs!r}", f"A {level} estimator may have `needs` out of {known}")
    return tuple(needs)


def load_loss(name: str) -> PolicyLoss:
    """A row of `LOSSES`, or `FILE.py:function` like `LOSS`. Raises `ConfigError` with the problem and the fix.

    The function returns the loss of every token, of the shape [B, T] of `logprobs` and with a gradient to them. It may
    leave out `segments`, and have the attribute `formula` (a text for the header). None of its tokens counts as
    clipped.
    """
    if name in LOSSES:
        return LOSSES[name]
    return _user_loss(name)


@cache
def _user_loss(name: str) -> PolicyLoss:
    user = _load("algo.loss", name, LOSSES)
    takes_segments = _takes_segments(user)

    def fn(
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        segments: Tensor,
        *,
        low: float,
        high: float,
        dual_clip: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        optional = {"segments": segments} if takes_segments else {}
        loss = user.call(
            logprobs.shape,
            logprobs,
            old_logprobs,
            advantages,
            mask,
            low=low,
            high=high,
            dual_clip=dual_clip,
            **optional,
        )
        nothing_clipped = torch.zeros_like(mask)
        return loss, nothing_clipped

    _try_loss(user, fn)
    # The header formats it with the bounds: braces of the user's are text.
    formula = user.formula.replace("{", "{{").replace("}", "}}")
    return PolicyLoss(fn, formula, reads_dual_clip=True)


def _takes_segments(user: UserFunction) -> bool:
    """Whether the function takes `segments`. Raises `ConfigError` if it does not take the other arguments."""
    some = torch.zeros(1, 1)
    scalars = {"low": 0.2, "high": 0.2, "dual_clip": None}
    if user.takes(some, some, some, some, segments=some, **scalars):
        return True
    if user.takes(some, some, some, some, **scalars):
        return False
    raise user.error("takes other arguments than it would get", f"Write `{LOSS}`; `**_` will do for the keywords")


def _try_loss(user: UserFunction, fn: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Raise `ConfigError` unless the function gives logprobs a gradient."""
    logprobs = torch.tensor(
        [[-0.5, -1.0, 0.0, -2.0], [-0.1, -3.0, -1.5, 0.0]],
        requires_grad=True,
    )
    old_logprobs = logprobs.detach() - 0.05
    advantages = torch.tensor([[1.0, 1.0, 0.0, 1.0], [-0.5, -0.5, -0.5, 0.0]])
    mask = advantages != 0
    segments = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])
    loss, _ = fn(logprobs, old_logprobs, advantages, mask, segments, low=0.2, high=0.2)
    size = _gradient_size(loss, logprobs)
    if not 0 < size < inf:
        raise user.error(f"gives logprobs a gradient of size {size}", "Use them without detach() and without 0 / 0")


def _gradient_size(loss: Tensor, logprobs: Tensor) -> float:
    """The 1-norm of the gradient; 0 where there is none."""
    if not loss.requires_grad:
        return 0.0
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs, allow_unused=True)
    if gradient is None:
        return 0.0
    return float(gradient.abs().sum())


def absolute(name: str) -> str:
    """The same name for a process that started in another directory."""
    path, _, function = name.rpartition(":")
    if not path:
        return name
    return f"{Path(path).resolve()}:{function}"


def unknown_row(flag: str, name: str, known: Iterable[str], own: str = "") -> ConfigError:
    """No row has this name. own: what a user may write in place of one."""
    known = list(known)
    fix = f"Use one of: {', '.join(known)}"
    if own:
        fix += f", or your own as {own}"
    return ConfigError(
        f"`{flag}` (={name}) is none of molt's, so nothing was started.{did_you_mean(name, known)} {fix}."
    )


def _load(flag: str, name: str, known: Iterable[str]) -> UserFunction:
    path, _, function = name.rpartition(":")
    if not path:
        raise unknown_row(flag, name, known, "FILE.py:function")

    module = load_module(path, flag)
    functions = {key: value for key, value in vars(module).items() if callable(value)}
    if function not in functions:
        near = did_you_mean(function, functions)
        raise ConfigError(f"`{flag}` (={name}) names no function of {path}, so nothing was started.{near} Correct it.")
    return UserFunction(flag, name, functions[function])
