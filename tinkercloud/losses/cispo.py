"""-sg(clip(r, low, high)) l A (arXiv 2506.13585): the clipped ratio is a weight, not a path.

The gradient flows through l alone, so that clipped tokens still learn.
"""

from collections.abc import Mapping

from torch import Tensor

from tinkercloud.losses.importance_sampling import importance_ratio


def loss(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """logprobs, inputs["logprobs"] (the sampler's) and inputs["advantages"]: (N,)."""
    ratio = importance_ratio(logprobs, inputs).detach()
    weight = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -weight * inputs["advantages"] * logprobs
