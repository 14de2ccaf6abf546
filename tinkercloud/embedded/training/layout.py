"""Which rows a pass computes. A prefix that datums of one model share is computed once: samples of
one prompt, turns of one conversation.

A row depends on its token and those before it alone, so equal prefixes have equal rows; targets
differ, so that a row has several. The gradient of a shared row is the sum of the gradients that its
datums would have had there.

Axes: T packed rows of a pass, N tokens of a datum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinkercloud.core.types import Datum
from tinkercloud.embedded.forward.row_invariance import pad_rows

MIN_SHARED = 16
"""Rows. To share fewer costs more, since rows are then no longer neighbours in memory, than it
saves."""


class PrefixTree:
    """Rows of datums by the tokens before them; each new row gets the next number.

    shares False: every datum has rows of its own."""

    def __init__(self, first_row: int = 0, *, shares: bool = True):
        self._shares = shares
        self._first_row = self._end = first_row
        # The first MIN_SHARED tokens of a datum -> the row of the last of them.
        self._starts: dict[tuple[int, ...], int] = {}
        self._next: dict[tuple[int, int], int] = {}  # (row before, token) -> row

    @property
    def num_rows(self) -> int:
        return self._end - self._first_row

    def num_new(self, tokens: NDArray[np.int32]) -> int:
        """How many rows `add` would make."""
        return len(tokens) - len(self._shared_rows(tokens.tolist()))

    def add(self, tokens: NDArray[np.int32]) -> NDArray[np.int64]:
        """The row of each token (N,): first the shared ones, then new ones."""
        ids = tokens.tolist()
        rows = self._shared_rows(ids)
        num_new = len(ids) - len(rows)
        if not rows and num_new >= MIN_SHARED:
            self._starts[tuple(ids[:MIN_SHARED])] = self._end + MIN_SHARED - 1
        at = max(len(rows), MIN_SHARED)
        rows += range(self._end, self._end + num_new)
        self._end += num_new
        befores = zip(rows[at - 1 : -1], ids[at:], strict=True)
        self._next.update(zip(befores, rows[at:], strict=True))
        return np.array(rows, np.int64)

    def _shared_rows(self, ids: list[int]) -> list[int]:
        row = self._starts.get(tuple(ids[:MIN_SHARED]))
        if row is None or not self._shares:
            return []
        rows = list(range(row - MIN_SHARED + 1, row + 1))
        for token in ids[MIN_SHARED:]:
            row = self._next.get((row, token))
            if row is None:
                break
            rows.append(row)
        return rows


def alike_together(data: Sequence[Datum]) -> list[int]:
    """Indices of datums: those that share rows next to each other, else in order."""
    first_of: dict[tuple[int, ...], int] = {}
    starts = [tuple(datum.tokens[:MIN_SHARED].tolist()) for datum in data]
    firsts = [first_of.setdefault(start, i) for i, start in enumerate(starts)]
    return sorted(range(len(data)), key=firsts.__getitem__)


@dataclass(frozen=True, slots=True)
class Layout:
    """tokens, positions int64 (T,). rows: of each datum, share by share, (N,) each. ends: the row
    after the last one of each share. Rows beyond the last end are padding."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    rows: tuple[tuple[NDArray[np.int64], ...], ...]
    ends: tuple[int, ...]

    def sequences(self) -> list[NDArray[np.int64]]:
        """Rows that attend to each other: every datum's, and the padding's."""
        sequences = [rows for share in self.rows for rows in share]
        if self.ends[-1] < len(self.tokens):
            sequences.append(np.arange(self.ends[-1], len(self.tokens)))
        return sequences

    def span(self, share: int) -> tuple[int, int]:
        """First row of a share, and the one after its last."""
        return (self.ends[share - 1] if share else 0), self.ends[share]


def lay_out(shares: Sequence[Sequence[Datum]]) -> Layout:
    """shares: each model's datums. Rows are shared within a share only, so that what a share gets
    does not depend on the others (up to rounding where products are not row-invariant)."""
    rows: list[tuple[NDArray[np.int64], ...]] = []
    ends: list[int] = []
    for data in shares:
        tree = PrefixTree(ends[-1] if ends else 0)
        rows.append(tuple(tree.add(datum.tokens) for datum in data))
        ends.append((ends[-1] if ends else 0) + tree.num_rows)
    size = pad_rows(ends[-1])
    tokens, positions = np.zeros(size, np.int64), np.zeros(size, np.int64)
    positions[ends[-1] :] = np.arange(size - ends[-1])
    for data, of_share in zip(shares, rows, strict=True):
        for datum, datum_rows in zip(data, of_share, strict=True):
            tokens[datum_rows] = datum.tokens
            positions[datum_rows] = np.arange(len(datum_rows))
    return Layout(tokens, positions, tuple(rows), tuple(ends))
