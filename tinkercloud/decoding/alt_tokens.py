"""Draws from the model's distributions over a prompt's tokens.

Axes: n positions, V vocabulary, k draws.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.core.types import SamplingParams
from tinkercloud.decoding.sampler import lowest_argmax

_SAMPLE_INDEX = 1 << 63
"""In the key of the random numbers, where a sample has its index: samples have none as large."""


def alt_tokens(logits: Tensor, params: SamplingParams, first: int, k: int) -> Tensor:
    """k independent draws, with replacement, from each row of logits (n, V) at the request's
    temperature: int64 (n, k); at temperature 0 all are the likeliest. first: the position that the
    first row predicts.

    By inversion of the cumulative distribution, a random number for each draw: Gumbel noise would
    take V for each. They depend on seed, position and draw alone.
    """
    if params.temperature == 0:
        return lowest_argmax(logits)[:, None].expand(-1, k).cpu()
    tokens = np.empty((len(logits), k), np.int64)
    for i, row in enumerate(logits.float().cpu().numpy()):
        # Row by row: in what order a sum of several rows is added is up to their number.
        weights = row.astype(np.float64) / params.temperature
        masses = np.cumsum(np.exp(weights - weights.max()))
        uniform = _uniform(params.seed, first + i, k)
        tokens[i] = np.searchsorted(masses, uniform * masses[-1], side="right")
    # A number that rounds up to the whole mass would be beyond the last token.
    return torch.from_numpy(tokens.clip(max=logits.shape[-1] - 1))


def _uniform(seed: int, position: int, k: int) -> NDArray[np.float64]:
    """In [0, 1), 53 bits each."""
    bits = np.random.Philox(
        key=np.array([seed, _SAMPLE_INDEX], dtype=np.uint64),
        counter=np.array([0, position, 0, 0], dtype=np.uint64),
    )
    return (bits.random_raw(k) >> 11).astype(np.float64) * 2.0**-53
