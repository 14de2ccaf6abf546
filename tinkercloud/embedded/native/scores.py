"""Targets whose log-probabilities a pass computes without keeping logits (unembed.c).

Axes: N rows, P targets, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.decoding.sampler import logprobs_of
from tinkercloud.embedded.native import structures as mirror


@dataclass(frozen=True, slots=True)
class Targets:
    """rows int64 (N,): of a batch, ascending. starts int64 (N + 1,): where a row's targets begin in
    ids int64 (P,), which are below V."""

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    ids: NDArray[np.int64]

    def __post_init__(self) -> None:
        assert len(self.starts) == len(self.rows) + 1
        assert self.starts[-1] == len(self.ids)
        for array in (self.rows, self.starts, self.ids):
            assert array.dtype == np.int64
            assert array.flags.c_contiguous


class Scores:
    """logits float32 (P,) of the targets and norms float64 (N,), the log of the sum of exp of all
    of a row's, once a pass has run with `request`."""

    def __init__(self, targets: Targets):
        self.targets = targets
        self.logits = torch.empty(len(targets.ids))
        self.norms = torch.empty(len(targets.rows), dtype=torch.float64)
        self.request = mirror.Scores(
            len(targets.rows),
            *(a.ctypes.data for a in (targets.rows, targets.starts, targets.ids)),
            *(self.logits.data_ptr(), self.norms.data_ptr()),
        )

    def logprobs(self) -> Tensor:
        """Of the targets, float32 (P,)."""
        counts = torch.from_numpy(np.diff(self.targets.starts))
        return logprobs_of(self.logits, self.norms.repeat_interleave(counts))
