"""Tokens that a pass draws without keeping logits (draw.c).

Axes: N rows, V vocabulary.
"""

from collections.abc import Sequence
from ctypes import Array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinkercloud.decoding.sampler import Candidates, RowParams
from tinkercloud.embedded.native import structures as mirror

LIMIT = 16  # of a row's tokens that may win; two are many


@dataclass(frozen=True, slots=True)
class DrawnFrom:
    """rows int64 (N,): of a batch, ascending. params: what each is drawn with, of the whole
    vocabulary."""

    rows: NDArray[np.int64]
    params: Sequence[RowParams]

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.params)
        assert all(row.is_whole for row in self.params)


class Drawing:
    """`candidates`, once a pass has run with `request`."""

    def __init__(self, drawn_from: DrawnFrom):
        num = len(drawn_from.rows)
        self.candidates = Candidates(
            norm=np.empty(num, np.float64),
            count=np.empty(num, np.int64),
            ids=np.empty((num, LIMIT), np.int64),
            words=np.empty((num, LIMIT), np.uint32),
            weights=np.empty((num, LIMIT), np.float32),
        )
        self._kept = (np.ascontiguousarray(drawn_from.rows), draws_of(drawn_from.params))
        rows, draws = self._kept
        each = self.candidates
        out = (each.norm, each.count, each.ids, each.words, each.weights)
        self.request = mirror.Drawing(
            num, LIMIT, rows.ctypes.data, draws, *(array.ctypes.data for array in out)
        )


def draws_of(rows: Sequence[RowParams]) -> Array[mirror.Draw]:
    return (mirror.Draw * len(rows))(
        *[
            (p.temperature, p.top_k, p.top_p, p.seed, row.sample_index, row.position)
            for row in rows
            for p in (row.params,)
        ]
    )
