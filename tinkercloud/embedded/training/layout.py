"""Which rows a pass computes. A prefix that datums of one model share is computed once: samples of
one prompt, turns of one conversation.

A row depends on its token and those before it alone, so equal prefixes have equal rows; targets
differ, so that a row has several. The gradient of a shared row is the sum of the gradients that its
datums would have had there. Whole blocks of tokens are shared, as sequences share keys and values.

Axes: T packed rows of a pass, N tokens of a datum, S datums.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinkercloud.core.types import Datum
from tinkercloud.embedded.forward.kv_blocks import BLOCK_TOKENS
from tinkercloud.embedded.forward.row_invariance import pad_rows


class PrefixTree:
    """Rows of datums by the tokens before them; each new row gets the next number.

    shares False: every datum has rows of its own."""

    def __init__(self, first_row: int = 0, *, shares: bool = True):
        self._shares = shares
        self._first_row = self._end = first_row
        # (first row of the block before or -1, tokens of a block) -> the block's first row.
        self._blocks: dict[tuple[int, bytes], int] = {}

    @property
    def num_rows(self) -> int:
        return self._end - self._first_row

    def num_new(self, tokens: NDArray[np.int32]) -> int:
        """How many rows `add` would make."""
        return len(tokens) - BLOCK_TOKENS * len(self._shared_blocks(tokens))

    def add(self, tokens: NDArray[np.int32]) -> NDArray[np.int64]:
        """The row of each token (N,): first the shared ones, then new ones."""
        starts = self._shared_blocks(tokens)
        num_shared = BLOCK_TOKENS * len(starts)
        num_new = len(tokens) - num_shared
        before = starts[-1] if starts else -1
        for at in range(num_shared, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            row = self._end + at - num_shared
            self._blocks[before, tokens[at : at + BLOCK_TOKENS].tobytes()] = row
            before = row
        shared = [np.arange(row, row + BLOCK_TOKENS) for row in starts]
        self._end += num_new
        return np.concatenate([*shared, np.arange(self._end - num_new, self._end)])

    def _shared_blocks(self, tokens: NDArray[np.int32]) -> list[int]:
        """The first rows of the blocks that are there."""
        starts: list[int] = []
        for at in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = (starts[-1] if starts else -1, tokens[at : at + BLOCK_TOKENS].tobytes())
            row = self._blocks.get(block)
            if row is None or not self._shares:
                break
            starts.append(row)
        return starts


def alike_together(data: Sequence[Datum]) -> list[int]:
    """Indices of datums: those that share rows next to each other, else in order."""
    first_of: dict[tuple[int, ...], int] = {}
    starts = [tuple(datum.tokens[:BLOCK_TOKENS].tolist()) for datum in data]
    firsts = [first_of.setdefault(start, i) for i, start in enumerate(starts)]
    return sorted(range(len(data)), key=firsts.__getitem__)


def first_owners(sequences: Sequence[NDArray[np.int64]], num_rows: int) -> NDArray[np.int32]:
    """(num_rows,): the first of the sequences that has the row; together they have all."""
    owners = np.full(num_rows, -1, np.int32)
    for index, rows in reversed(list(enumerate(sequences))):
        owners[rows] = index
    assert (owners >= 0).all(), "rows without a sequence"
    return owners


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

    def owners(self) -> NDArray[np.int32]:
        """(T,): the first of `sequences` that has the row."""
        return first_owners(self.sequences(), len(self.tokens))

    def block_tables(self) -> tuple[NDArray[np.int32], int]:
        """The block of each BLOCK_TOKENS positions of each of `sequences`, (S, blocks); how many
        blocks there are. Shared rows lie in shared blocks."""
        starts = [rows[::BLOCK_TOKENS] for rows in self.sequences()]
        first_rows, blocks = np.unique(np.concatenate(starts), return_inverse=True)
        tables = np.zeros((len(starts), max(map(len, starts))), np.int32)
        for table, numbers in zip(
            tables, np.split(blocks, np.cumsum([len(s) for s in starts])[:-1]), strict=True
        ):
            table[: len(numbers)] = numbers
        return tables, len(first_rows)

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
