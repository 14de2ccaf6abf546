"""-g(r) A + kl_coeff (g(r) - 1 - log r), with r = exp(l - q) and g(r) = r up to the bound c, then
c (1 + log(r / c)). The formula is ours: that of the hosted service is not published.

By l the derivative is -min(r, c) A + kl_coeff (min(r, c) - 1): REINFORCE with truncated importance
weights by token (as in V-trace, arXiv 1802.01561), bounded however far policy and sampler have
drifted apart. q are the sampler's recorded log-probabilities.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def loss(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """logprobs, inputs "logprobs" (the sampler's), "advantages", "sampled_mask": (N,).

    Only sampled tokens contribute. The second term is the k3 estimate of KL(sampler || policy)
    with its gradient bounded in the same way.
    """
    advantages, bound = inputs["advantages"], config["clip_high_threshold"]
    active = (advantages != 0) | ((inputs["sampled_mask"] != 0) & (config["kl_coeff"] != 0))
    delta = torch.where(active, logprobs - inputs["logprobs"], 0.0)
    weight = bounded_ratio(delta, bound)
    value = -weight * advantages
    if config["kl_coeff"]:
        value = value + config["kl_coeff"] * (weight - 1.0 - delta)
    return torch.where(active, value, 0.0)


def bounded_ratio(delta: Tensor, bound: float) -> Tensor:
    """g(exp(delta)): its derivative by delta is min(exp(delta), bound)."""
    limit = math.log(bound)
    # exp of the clamped only: past the bound exp(delta) may overflow, and inf * 0 is not 0
    below = delta.clamp(max=limit).exp()
    return torch.where(delta <= limit, below, bound * (1.0 + delta - limit))
