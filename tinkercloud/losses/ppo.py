"""-min(r A, clip(r, low, high) A), the clipped surrogate (arXiv 1707.06347) by token.

The thresholds are bounds on the ratio itself, not distances from 1.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tinkercloud.losses.importance_sampling import importance_ratio


def loss(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """logprobs, inputs["logprobs"] (the sampler's) and inputs["advantages"]: (N,)."""
    return clipped_surrogate(importance_ratio(logprobs, inputs), inputs["advantages"], config)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, config: Mapping[str, float]) -> Tensor:
    """The pessimistic one of the plain and the clipped objective, negated; (N,)."""
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)
