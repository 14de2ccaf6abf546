"""-min(s_t A, clip(s_t, low, high) A) with one ratio s per sequence (arXiv 2507.18071, GSPO-token).

s = exp(mean of l - q over the masked tokens) without gradient; s_t = s exp(l_t - sg(l_t)) equals
s and carries the gradient of its own token.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tinkercloud.losses.ppo import clipped_surrogate


def loss(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """logprobs, inputs "logprobs" (the sampler's), "advantages", "sequence_ratio_mask": (N,).

    The sequence is the datum. The mask only chooses (by != 0) what the ratio averages over; with
    none chosen the ratio is 1.
    """
    mask = inputs["sequence_ratio_mask"] != 0
    current = logprobs.detach()
    total = torch.where(mask, current - inputs["logprobs"], 0.0).sum()
    ratio = (total / mask.sum().clamp(min=1)).exp()
    delta = torch.where(inputs["advantages"] == 0, 0.0, logprobs - current)  # 0, with gradient
    return clipped_surrogate(ratio * delta.exp(), inputs["advantages"], config)
