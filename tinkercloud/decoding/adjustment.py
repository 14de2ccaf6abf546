"""What a request changes of a row's logits before they are warped: penalties, and a grammar's mask.

Axes: V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinkercloud.core.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Adjustment:
    """sampled: the tokens that the sample has before the row's. allowed: bool (V,) or shorter, what
    a grammar takes next, never nothing; None: everything."""

    params: SamplingParams
    sampled: tuple[int, ...] = ()
    allowed: Tensor | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """A row's logits (V,), in float32; the argument is left as it is.

        Penalties are OpenAI's: less presence_penalty for each token that was sampled, and less
        frequency_penalty for each time that it was. Tokens of the prompt do not count.
        https://platform.openai.com/docs/guides/text-generation
        """
        adjusted = logits.float().clone()
        if self.sampled and self.params.has_penalties:
            ids, counts = np.unique(np.array(self.sampled), return_counts=True)
            penalties = self.params.presence_penalty + self.params.frequency_penalty * counts
            adjusted[torch.from_numpy(ids).to(logits.device)] -= torch.from_numpy(
                penalties.astype(np.float32)
            ).to(logits.device)
        if self.allowed is not None:
            num_known = len(self.allowed)
            adjusted[:num_known].masked_fill_(~self.allowed.to(logits.device), float("-inf"))
            adjusted[num_known:] = float("-inf")
        return adjusted


def adjustment_of(
    params: SamplingParams, sampled: Sequence[int], allowed: Tensor | None = None
) -> Adjustment | None:
    """None where nothing is changed."""
    if allowed is None and not params.has_penalties:
        return None
    return Adjustment(params, tuple(sampled), allowed)
