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
    rows each. logit_rows (W,): the rows whose logits are computed, ascending.
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
class Part:
    """Rows of one sequence: the place of the first in it, the sequence's blocks, and of how many of
    the last rows the logits are computed."""

    version: Version
    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    num_logits: int


def ragged(parts: Sequence[Part]) -> Batch:
    """One batch of them; those of one version are neighbours."""
    tables = np.zeros((len(parts), max(len(part.blocks) for part in parts)), np.int32)
    tokens: list[int] = []
    logit_rows: list[int] = []
    versions: list[tuple[Version, int]] = []
    for i, part in enumerate(parts):
        tables[i, : len(part.blocks)] = part.blocks
        tokens += part.tokens
        logit_rows += range(len(tokens) - part.num_logits, len(tokens))
        if versions and versions[-1][0] is part.version:
            versions[-1] = (part.version, versions[-1][1] + len(part.tokens))
        else:
            versions.append((part.version, len(part.tokens)))
    counts = np.array([len(part.tokens) for part in parts])
    starts = np.array([part.start for part in parts])
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return Batch(
        np.array(tokens, np.int64),
        (np.repeat(starts, counts) + within).astype(np.int32),
        np.repeat(np.arange(len(parts)), counts).astype(np.int32),
        tables,
        versions,
        np.array(logit_rows, np.int64),
    )
