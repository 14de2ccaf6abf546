"""What a token is drawn from, by the obvious way, on numpy alone.

Axes: V vocabulary.
"""

import numpy as np
from numpy.typing import NDArray

from tinkercloud.core.types import SamplingParams

Floats = NDArray[np.float64]


def log_softmax(logits: Floats) -> Floats:
    """Over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def distribution(logprobs: Floats, params: SamplingParams) -> Floats:
    """(V,) log-probabilities after temperature, top_k, top_p, min_p; -inf where excluded."""
    scaled = log_softmax(logprobs / params.temperature)
    if params.top_k == -1 and params.top_p == 1.0 and params.min_p == 0.0:
        return scaled
    order = np.argsort(-scaled, kind="stable")
    keep = len(order) if params.top_k == -1 else params.top_k
    if params.top_p < 1.0:
        before = np.cumsum(np.exp(scaled[order])) - np.exp(scaled[order])
        keep = min(keep, int((before < params.top_p).sum()))
    scaled[order[max(keep, 1) :]] = -np.inf
    scaled[np.exp(scaled) < params.min_p * np.exp(scaled.max())] = -np.inf
    return log_softmax(scaled)
