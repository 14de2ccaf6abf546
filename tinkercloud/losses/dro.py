"""-(l A - beta / 2 (l - q)^2): direct reward optimisation (arXiv 2405.19107) by token."""

from collections.abc import Mapping

import torch
from torch import Tensor


def loss(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """logprobs, inputs["logprobs"] (the sampler's) and inputs["advantages"]: (N,).

    A token whose advantage is 0 contributes nothing, not even the quadratic term: prompt positions
    carry a placeholder for q, and pulling the policy towards it would train the prompt.
    """
    advantages = inputs["advantages"]
    delta = torch.where(advantages == 0, 0.0, logprobs - inputs["logprobs"])
    return 0.5 * config["beta"] * delta.square() - advantages * logprobs
