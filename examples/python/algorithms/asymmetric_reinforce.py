"""A policy loss: what was good is imitated as it is, what was bad is pushed away only as far as it is still likely.

    molt rl ... --algo.loss examples/python/algorithms/asymmetric_reinforce.py:asymmetric_reinforce

`-A logp` where A >= 0, and `-min(r, 1) A logp` with `r = exp(logp - old)`, without gradient, where A < 0. All tensors
float [B, T], one entry per token; molt multiplies what is returned by the weight of the token and adds it up.
Source: TOPR, arXiv 2503.14286, with the ratio of a token in place of that of the whole answer.
"""

import torch


def asymmetric_reinforce(logprobs, old_logprobs, advantages, mask, **_):
    ratio = (logprobs.detach() - old_logprobs).exp().clamp(max=1)
    return -torch.where(advantages < 0, ratio, 1.0) * advantages * logprobs


asymmetric_reinforce.formula = "-(1 if A >= 0 else min(r, 1)) A logprob"
