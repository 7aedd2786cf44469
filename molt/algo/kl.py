"""The KL of the policy to a reference: estimators per token, and the controller of its coefficient."""

import torch
from torch import Tensor

from molt.algo.ratio import log_ratio

FORMULAS = {"k1": "d", "k2": "d^2 / 2", "k3": "exp(-d) - 1 + d"}
"""The estimators as text, with `d = logprob - reference`."""
FORWARD_K3 = "exp(d) - 1 - d"
"""k3 where the reference sampled the tokens."""


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, estimator: str, *, from_reference: bool = False) -> Tensor:
    """k1 `d`, k2 `d^2 / 2`, k3 `exp(-d) - 1 + d`, with `d = clamp(logprobs - ref_logprobs, -30, 30)`.

    k1 and k3 have the mean KL(policy || reference) over tokens that the policy sampled. With `from_reference` the
    reference sampled them and k3 is `exp(d) - 1 - d`, of mean KL(reference || policy). As a loss, over tokens of the
    policy, k2 has the gradient of KL(policy || reference), k3 that of KL(reference || policy), k1 none on average.

    logprobs, ref_logprobs: float [...], one entry per token. Returns [...], with a gradient through `logprobs` alone.
    Raises `TrainingError` on a NaN, `KeyError` for another estimator.
    Source: Schulman 2020 (joschu.net/blog/kl-approx).
    """
    d = log_ratio(logprobs=logprobs, ref_logprobs=ref_logprobs.detach())
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator != "k3":
        raise KeyError(estimator)
    if from_reference:
        return torch.expm1(d) - d
    return torch.expm1(-d) + d


def adapt(coef: float, kl: float, *, target: float, horizon: float, rollouts: int) -> float:
    """`coef * (1 + clip(kl / target - 1, -0.2, 0.2) * rollouts / horizon)`: the next coefficient of the KL.

    kl: its mean over the trained tokens of the batch. rollouts: in that batch.
    Source: Ziegler et al. 2019, arXiv 1909.08593.
    """
    error = kl / target - 1
    bounded = min(max(error, -0.2), 0.2)
    return coef * (1 + bounded * rollouts / horizon)
