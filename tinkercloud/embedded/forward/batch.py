"""What one forward pass computes: rows of any number of sequences, any number of each.

Axes: M rows, W of them with logits, S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.decoding.sampler import RowParams
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.native.drawing import DrawnFrom
from tinkercloud.embedded.native.scores import Targets


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that share base weights; those of one version are neighbours.

    tokens, positions, sequence (M,): each row's id, its place in its sequence, and its sequence's
    row in tables (S, blocks); a sequence's rows are neighbours, in order. versions: with how many
    rows each. logit_rows (W,): the rows whose logits are computed, ascending: a prompt of a
    thousand rows needs those of its last one. targets: of rows that are scored, drawn_from: rows
    that tokens are drawn from, by a runner that does so in the pass.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int32]
    sequence: NDArray[np.int32]
    tables: NDArray[np.int32]
    versions: Sequence[tuple[Version, int]]
    logit_rows: NDArray[np.int64]
    targets: Targets | None = None
    drawn_from: DrawnFrom | None = None

    @property
    def base(self) -> BaseModel:
        return self.versions[0][0].base

    @property
    def is_decode(self) -> bool:
        """One row of each sequence."""
        return len(self.tokens) == len(self.tables)


@dataclass(frozen=True, slots=True)
class RowScores:
    """Of a batch's targets: their logits, float32, and the log of the sum of exp of each scored
    row's logits, float64."""

    logits: Tensor
    norms: Tensor


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Rows of one sequence: start: the place of the first in it; blocks: all of the sequence's;
    num_logit_rows: of the last ones. targets (n, K): of the n rows from `first_scored` on, 0 being
    the first. drawn_with: of the last rows, which the pass draws from; it tells the logits of the
    tokens that follow them here, and keeps all of theirs where `keeps_logits`."""

    version: Version
    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    num_logit_rows: int
    first_scored: int = 0
    targets: NDArray[np.int64] | None = None
    drawn_with: Sequence[RowParams] = ()
    keeps_logits: bool = False


def ragged(sequences: Sequence[SequenceRows]) -> Batch:
    """One batch of them; those of one version are neighbours."""
    num_blocks = max(len(sequence.blocks) for sequence in sequences)
    tables = np.zeros((len(sequences), num_blocks), np.int32)
    tokens: list[int] = []
    positions: list[int] = []
    sequence_of: list[int] = []
    logit_rows: list[int] = []
    versions: list[tuple[Version, int]] = []
    drawn: list[tuple[int, RowParams, bool, int]] = []
    for i, sequence in enumerate(sequences):
        tables[i, : len(sequence.blocks)] = sequence.blocks
        count, start = len(sequence.tokens), sequence.start
        tokens += sequence.tokens
        positions += range(start, start + count)
        sequence_of += [i] * count
        logit_rows += range(len(tokens) - sequence.num_logit_rows, len(tokens))
        first_drawn = len(tokens) - len(sequence.drawn_with)
        if sequence.drawn_with:
            followed_by = (*tokens[first_drawn + 1 :], -1)
            for i, params in enumerate(sequence.drawn_with):
                drawn.append((first_drawn + i, params, sequence.keeps_logits, followed_by[i]))
        if versions and versions[-1][0] is sequence.version:
            versions[-1] = (sequence.version, versions[-1][1] + count)
        else:
            versions.append((sequence.version, count))
    return Batch(
        np.array(tokens, np.int64),
        np.array(positions, np.int32),
        np.array(sequence_of, np.int32),
        tables,
        versions,
        np.array(logit_rows, np.int64),
        _targets(sequences),
        _drawn_from(drawn),
    )


def _drawn_from(drawn: Sequence[tuple[int, RowParams, bool, int]]) -> DrawnFrom | None:
    if not drawn:
        return None
    rows, params, keeps, followed_by = zip(*drawn, strict=True)
    return DrawnFrom(
        np.array(rows, np.int64), params, np.array(keeps), np.array(followed_by, np.int64)
    )


def _targets(sequences: Sequence[SequenceRows]) -> Targets | None:
    rows: list[NDArray[np.int64]] = []
    counts: list[NDArray[np.int64]] = []
    ids: list[NDArray[np.int64]] = []
    first = 0
    for sequence in sequences:
        if sequence.targets is not None and len(sequence.targets):
            num_rows, per_row = sequence.targets.shape
            rows.append(first + sequence.first_scored + np.arange(num_rows))
            counts.append(np.full(num_rows, per_row))
            ids.append(sequence.targets.ravel())
        first += len(sequence.tokens)
    if not rows:
        return None
    starts = np.concatenate(([0], np.cumsum(np.concatenate(counts))))
    return Targets(np.concatenate(rows), starts, np.concatenate(ids))
