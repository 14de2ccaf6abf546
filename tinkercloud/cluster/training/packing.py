"""From datums to packed micro-batches: which rank computes what, and in which rows.

Sequences are packed without a batch axis ("thd"); each is padded at its end, where causal attention
never sees the padding, to a multiple of what tensor and context parallelism divide by. Context
parallelism divides every sequence into 2 cp pieces and gives rank r the pieces r and 2 cp - 1 - r
("zig-zag"): causal attention then costs every rank the same, and Megatron's attention expects it.

Axes: T rows of a micro-batch, C = T / cp rows of one context-parallel rank, K targets per position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinkercloud.core.types import Datum
from tinkercloud.errors import UserError
from tinkercloud.planning.plan import Layout


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Datums that are packed together.

    indices: positions of the datums in the request; () for an empty micro-batch, whose single
    sequence is padding without a loss. lengths: rows of each sequence with padding; their sum is T.
    """

    indices: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return sum(self.lengths)

    @property
    def boundaries(self) -> NDArray[np.int32]:
        """Where sequences begin and end among all T rows: (len(lengths) + 1,), the first 0."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one context-parallel rank. tokens, positions int64 (C,)."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]


def alignment(layout: Layout) -> int:
    """The number of rows that every sequence's length is a multiple of."""
    pieces = 2 * layout.cp if layout.cp > 1 else 1
    return pieces * (layout.tp if layout.sequence_parallel else 1)


def padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def check_lengths(data: Sequence[Datum], layout: Layout) -> None:
    """Raises UserError for a sequence that no micro-batch can hold."""
    for i, datum in enumerate(data):
        if len(datum.tokens) > layout.microbatch_tokens:
            raise UserError(
                f"datum {i} has {len(datum.tokens)} tokens; one training sequence may have "
                f"{layout.microbatch_tokens} here (the plan's tokens per micro-batch)"
            )


def plan_micro_batches(data: Sequence[Datum], layout: Layout) -> list[list[MicroBatch]]:
    """The micro-batches of every data-parallel rank, equally many for each.

    A pure function, so that all ranks agree without communication. Every datum is in exactly one
    micro-batch. Ranks with fewer get empty ones: a rank that made fewer passes would leave the
    others waiting in the collectives of expert parallelism, which span data-parallel ranks.
    """
    multiple = alignment(layout)
    lengths = [padded(len(datum.tokens), multiple) for datum in data]
    ranks = [
        _pack(indices, lengths, layout.microbatch_tokens)
        for indices in distribute(lengths, layout.dp)
    ]
    empty = MicroBatch((), (multiple,))
    count = max(map(len, ranks))
    return [batches + [empty] * (count - len(batches)) for batches in ranks]


def distribute(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices for each rank, ascending. The longest go first, each to the rank with fewest rows."""
    loads = [0] * num_ranks
    owned: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = loads.index(min(loads))
        owned[rank].append(index)
        loads[rank] += lengths[index]
    return [sorted(indices) for indices in owned]


def _pack(indices: Sequence[int], lengths: Sequence[int], max_rows: int) -> list[MicroBatch]:
    """Consecutive datums while they fit; one that padding makes too long is a batch by itself."""
    batches: list[list[int]] = []
    rows = 0
    for index in indices:
        if not batches or rows + lengths[index] > max_rows:
            batches.append([])
            rows = 0
        batches[-1].append(index)
        rows += lengths[index]
    return [MicroBatch(tuple(b), tuple(lengths[i] for i in b)) for b in batches]


def zigzag(lengths: Sequence[int], cp: int, rank: int) -> NDArray[np.int64]:
    """Which of the T rows a context-parallel rank holds: (C,), in its order."""
    if cp == 1:
        return np.arange(sum(lengths))
    pieces, start = [], 0
    for length in lengths:
        size = length // (2 * cp)
        for piece in (rank, 2 * cp - 1 - rank):
            pieces.append(np.arange(start + piece * size, start + (piece + 1) * size))
        start += length
    return np.concatenate(pieces)


def rows(batch: MicroBatch, data: Sequence[Datum], cp: int, cp_rank: int) -> Rows:
    """The network's input: padding is token 0, at positions that go on counting."""
    tokens = np.zeros(batch.num_rows, np.int64)
    for index, start in zip(batch.indices, batch.boundaries, strict=False):
        sequence = data[index].tokens
        tokens[start : start + len(sequence)] = sequence
    positions = np.concatenate([np.arange(length) for length in batch.lengths])
    chosen = zigzag(batch.lengths, cp, cp_rank)
    return Rows(tokens[chosen], positions[chosen])


def targets(batch: MicroBatch, data: Sequence[Datum]) -> NDArray[np.int64]:
    """(T, K) target ids, K the largest of the micro-batch; 0 where a datum has none."""
    arrays = [np.asarray(data[i].inputs["target_tokens"], np.int64) for i in batch.indices]
    wide = [array if array.ndim == 2 else array[:, None] for array in arrays]
    packed = np.zeros((batch.num_rows, max((t.shape[1] for t in wide), default=1)), np.int64)
    for array, start in zip(wide, batch.boundaries, strict=False):
        packed[start : start + len(array), : array.shape[1]] = array
    return packed
