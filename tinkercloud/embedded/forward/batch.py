"""What one forward pass computes: rows of any number of sequences, any number of each.

Axes: M rows, W of them with logits, S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that share base weights; those of one version are neighbours.

    tokens, positions, sequence (M,): each row's id, its place in its sequence, and its sequence's
    row in tables (S, blocks); a sequence's rows are neighbours, in order. versions: with how many
    rows each. logit_rows (W,): the rows whose logits are computed, ascending: a prompt of a
    thousand rows needs those of its last one.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int32]
    sequence: NDArray[np.int32]
    tables: NDArray[np.int32]
    versions: Sequence[tuple[Version, int]]
    logit_rows: NDArray[np.int64]

    @property
    def base(self) -> BaseModel:
        return self.versions[0][0].base

    @property
    def is_decode(self) -> bool:
        """One row of each sequence."""
        return len(self.tokens) == len(self.tables)


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Rows of one sequence: start: the place of the first in it; blocks: all of the sequence's;
    num_logit_rows: of the last ones."""

    version: Version
    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    num_logit_rows: int


def ragged(sequences: Sequence[SequenceRows]) -> Batch:
    """One batch of them; those of one version are neighbours."""
    num_blocks = max(len(sequence.blocks) for sequence in sequences)
    tables = np.zeros((len(sequences), num_blocks), np.int32)
    tokens: list[int] = []
    positions: list[int] = []
    sequence_of: list[int] = []
    logit_rows: list[int] = []
    versions: list[tuple[Version, int]] = []
    for i, sequence in enumerate(sequences):
        tables[i, : len(sequence.blocks)] = sequence.blocks
        count, start = len(sequence.tokens), sequence.start
        tokens += sequence.tokens
        positions += range(start, start + count)
        sequence_of += [i] * count
        logit_rows += range(len(tokens) - sequence.num_logit_rows, len(tokens))
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
    )
