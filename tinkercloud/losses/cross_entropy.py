"""-w l: weighted negative log-likelihood. Weights may be negative, fractional or zero."""

from collections.abc import Mapping

import torch
from torch import Tensor


def loss(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """logprobs and inputs["weights"]: (N,) or (N, K). Zero weights contribute exactly nothing."""
    weights = inputs["weights"]
    # An excluded target may be impossible (-inf), and 0 * inf is not 0.
    return -weights * torch.where(weights == 0, 0.0, logprobs)
