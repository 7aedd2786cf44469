"""The KL of the policy to a reference: estimators per token, and the controller of its coefficient."""

import torch
from torch import Tensor

from molt.algo.ratio import log_ratio

FORMULAS = {"k1": "d", "k2": "d^2 / 2", "k3": "exp(-d) - 1 + d"}
"""The estimators in words, with `d = logprob - reference`."""


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, estimator: str, *, from_reference: bool = False) -> Tensor:
    """k1 `d`, k2 `d^2 / 2`, k3 `exp(-d) - 1 + d`, with `d = clamp(logprobs - ref_logprobs, -30, 30)`.

    k1 and k3 have the mean KL(policy || reference) over tokens that the policy sampled. With `from_reference` the
    reference sampled them and k3 is `exp(d) - 1 - d`, of mean KL(reference || policy). As a loss, over tokens of the
    policy, k2 has the gradient of KL(policy || reference), k3 that of KL(reference || policy), k1 none on average.

    logprobs, ref_logprobs: float [...], one entry per token. Returns [...], with a gradient through `logprobs` alone.
    Raises `TrainingError` on a NaN.
    Source: Schulman 2020 (joschu.net/blog/kl-approx).
    """
    d = log_ratio(logprobs=logprobs, ref_logprobs=ref_logprobs.detach())
    if estimator == "k3":
        d = d if from_reference else -d
        return torch.expm1(d) - d
    return {"k1": d, "k2": d.square() / 2}[estimator]


def adapt(coef: float, kl: float, *, target: float, horizon: float, rollouts: int) -> float:
    """`coef * (1 + clip(kl / target - 1, -0.2, 0.2) * rollouts / horizon)`: the next coefficient of the KL.

    kl: its mean over the trained tokens of the batch. rollouts: in that batch.
    Source: Ziegler et al. 2019, arXiv 1909.08593.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * rollouts / horizon)
