"""-r A with r = exp(l - q): the policy gradient, corrected for the policy that sampled.

The gradient flows through r, so that d/dl = -r A.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def loss(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """logprobs, inputs["logprobs"] (the sampler's) and inputs["advantages"]: (N,)."""
    return -importance_ratio(logprobs, inputs) * inputs["advantages"]


def importance_ratio(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """r (N,), with gradient; 1 without gradient where the advantage is 0."""
    # Prompt positions carry a placeholder for q: r there may overflow, and 0 * inf is not 0.
    delta = torch.where(inputs["advantages"] == 0, 0.0, logprobs - inputs["logprobs"])
    return delta.exp()
