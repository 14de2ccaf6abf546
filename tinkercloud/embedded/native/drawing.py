"""Tokens that a pass draws while it makes logits (draw.c).

Axes: N rows, K of them with logits that are kept, V vocabulary.
"""

from collections.abc import Sequence
from ctypes import Array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.decoding.sampler import Candidates, RowParams
from tinkercloud.embedded.native import structures as mirror

LIMIT = 16  # of a row's tokens that may win; two are many


@dataclass(frozen=True, slots=True)
class DrawnFrom:
    """rows int64 (N,): of a batch, ascending. params: what each is drawn with, of the whole
    vocabulary. keeps bool (N,): whose logits are kept. drafted int64 (N,): of each a token whose
    logit is told besides; -1: none."""

    rows: NDArray[np.int64]
    params: Sequence[RowParams]
    keeps: NDArray[np.bool_]
    drafted: NDArray[np.int64]

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.params) == len(self.keeps) == len(self.drafted)
        assert all(row.is_whole for row in self.params)

    @property
    def num_kept(self) -> int:
        return int(self.keeps.sum())


class Drawing:
    """`candidates`, once a pass has run with `request`. logits (K, V): where those go that are
    kept."""

    def __init__(self, drawn_from: DrawnFrom, logits: Tensor):
        num = len(drawn_from.rows)
        assert len(logits) == drawn_from.num_kept
        self.candidates = Candidates(
            norm=np.empty(num, np.float64),
            count=np.empty(num, np.int64),
            ids=np.empty((num, LIMIT), np.int64),
            words=np.empty((num, LIMIT), np.uint32),
            weights=np.empty((num, LIMIT), np.float32),
            logits=logits,
            drafted_logits=np.full(num, np.nan, np.float32),
        )
        places = np.where(drawn_from.keeps, np.cumsum(drawn_from.keeps) - 1, -1)
        rows, drafted = map(np.ascontiguousarray, (drawn_from.rows, drawn_from.drafted))
        draws, each = draws_of(drawn_from.params), self.candidates
        self._read = (rows, draws, places, drafted)  # C has their addresses
        out = (each.norm, each.count, each.ids, each.words, each.weights)
        self.request = mirror.Drawing(
            *(num, LIMIT, rows.ctypes.data, draws, *(array.ctypes.data for array in out)),
            *(places.ctypes.data, logits.data_ptr()),
            *(drafted.ctypes.data, each.drafted_logits.ctypes.data),
        )


def draws_of(rows: Sequence[RowParams]) -> Array[mirror.Draw]:
    return (mirror.Draw * len(rows))(
        *[
            (p.temperature, p.top_k, p.top_p, p.seed, row.sample_index, row.position)
            for row in rows
            for p in (row.params,)
        ]
    )
