"""The distributions that drafted tokens were drawn from, and which drafts report theirs.

A distribution over a whole vocabulary is large compared with the token it gave, and the audit of
`calibration` needs no more than a share of them.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

AUDIT_EVERY = 97
"""A prime: no number of concurrent samples meets it at the same sample again and again."""
SUM_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class DraftDistribution:
    """What one token was drawn from, after the drafter's own temperature, top-k and top-p.

    ids int32 (n,): the tokens of probability above 0, ascending, as the target numbers them.
    probs float32 (n,): theirs, which sum to 1.
    """

    ids: NDArray[np.int32]
    probs: NDArray[np.float32]

    @classmethod
    def of(cls, probs: Tensor, ids: Tensor | None = None) -> Self:
        """probs (n,) of the tokens `ids` int64 (n,), ascending; None: of all, in their order."""
        possible = torch.nonzero(probs > 0)[:, 0]
        tokens = possible if ids is None else ids.to(possible.device)[possible]
        return cls(tokens.int().cpu().numpy(), probs[possible].float().cpu().numpy())

    def dense(self, vocab_size: int) -> NDArray[np.float64]:
        """Of every token, (V,)."""
        probs = np.zeros(vocab_size)
        probs[self.ids] = self.probs
        return probs

    def can_give(self, token: int, vocab_size: int) -> bool:
        """Whether this is a distribution over tokens 0..vocab_size - 1 with the token in it. Raises
        TypeError where the arrays are not what they should be."""
        ids, probs = self.ids, self.probs
        _check_form(ids, "i")
        _check_form(probs, "f")
        if not len(ids) or ids.shape != probs.shape or not np.isfinite(probs).all():
            return False
        if ids[0] < 0 or ids[-1] >= vocab_size or not (ids[:-1] < ids[1:]).all():
            return False
        if (probs < 0).any() or abs(float(probs.sum(dtype=np.float64)) - 1.0) > SUM_TOLERANCE:
            return False
        return bool((probs[ids == token] > 0).any())


def _check_form(array: object, kind: str) -> None:
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind != kind:
        raise TypeError


@dataclass(slots=True)
class AuditSchedule:
    """Picks one draft in `every` to report its distributions, by counting drafts, so that the
    choice is independent of what was drafted."""

    every: int = AUDIT_EVERY
    _num_seen: int = 0

    def takes(self, temperature: float) -> bool:
        """At temperature 0 nothing is drawn: never."""
        if temperature == 0:
            return False
        self._num_seen += 1
        return self._num_seen % self.every == 0
