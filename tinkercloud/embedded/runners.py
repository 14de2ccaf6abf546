"""One forward pass over a ragged batch: rows of any number of sequences, any number of each.

Axes: M rows, W of them wanted, D hidden size, V vocabulary, S sequences, Dh head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.decoding.sampler import Scan
from tinkercloud.embedded.base_model import BaseModel
from tinkercloud.embedded.blocks import BlockPool
from tinkercloud.embedded.native import AdapterTable, NativeModel, Team, library, scan
from tinkercloud.embedded.paged_context import PagedContext
from tinkercloud.embedded.versions import Version

_BASE = "base "


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that share base weights; those of one version are neighbours.

    tokens, positions, sequence (M,): each row's id, its place in its sequence, and its sequence's
    row in tables (S, blocks); a sequence's rows are neighbours, in order. versions: with how many
    rows each. wanted (W,): the rows whose logits are wanted, ascending.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int32]
    sequence: NDArray[np.int32]
    tables: NDArray[np.int32]
    versions: Sequence[tuple[Version, int]]
    wanted: NDArray[np.int64]

    @property
    def base(self) -> BaseModel:
        return self.versions[0][0].base


class Runner(Protocol):
    """is_exact: a row's bits depend on its own sequence's tokens alone, not on how they are cut
    into batches; so keys and values may be used wherever the same tokens stand."""

    is_exact: bool
    scan: Scan | None  # for `decoding.sampler.sample`

    def forward(self, batch: Batch, pool: BlockPool) -> Tensor:
        """Logits (W, V); writes the rows' keys and values into their blocks."""
        ...

    def rest(self) -> None:
        """Nothing is underway: keep no version's tensors."""
        ...


class NativeRunner:
    """The compiled pass: float32 on a CPU."""

    is_exact = True

    def __init__(self, num_threads: int):
        self._team = Team(num_threads)
        self.scan: Scan | None = partial(scan, self._team)
        self._models: dict[str, tuple[BlockPool, NativeModel]] = {}
        self._adapters: dict[str, AdapterTable] = {}

    def forward(self, batch: Batch, pool: BlockPool) -> Tensor:
        positions = torch.from_numpy(batch.positions.astype(np.int64))
        segments, first = [], 0
        for version, count in batch.versions:
            if version.adapter is not None:
                segments.append((first, count, version.scale, self._table(version)))
            first += count
        model = self._model(batch.versions[0][0], pool)
        rotary = batch.base.architecture.rotary(positions)
        return model.forward(self._team, batch, rotary, segments)

    def rest(self) -> None:
        self._models = {n: m for n, m in self._models.items() if n.startswith(_BASE)}
        self._adapters.clear()

    def _model(self, version: Version, pool: BlockPool) -> NativeModel:
        shared = version.weights is version.base.weights
        name = f"{_BASE}{version.base.name}" if shared else version.id
        known = self._models.get(name)
        if known is not None and known[0] is pool:
            return known[1]
        made = NativeModel(version.base.config, version.weights, pool.keys, pool.values)
        self._models[name] = (pool, made)
        return made

    def _table(self, version: Version) -> AdapterTable:
        if version.id not in self._adapters:
            assert version.adapter is not None
            layers = version.base.config.num_layers
            self._adapters[version.id] = AdapterTable(version.adapter, layers)
        return self._adapters[version.id]


class TorchRunner:
    """The same through torch: every device and number type, and what the other is tested against.

    Its rows are exact only when prompts are always cut at the same places.
    """

    is_exact = False
    scan: Scan | None = None

    def forward(self, batch: Batch, pool: BlockPool) -> Tensor:
        base = batch.base
        context = PagedContext(batch.versions, pool, batch.positions, batch.sequence, batch.tables)
        hidden = base.architecture.hidden(context, *context.padded(batch.tokens, base.device))
        return context.unembed(base.architecture, hidden, batch.wanted)

    def rest(self) -> None:
        """It keeps nothing."""


def runner_for(base: BaseModel, num_threads: int) -> Runner:
    """The fastest there is for the base's device and number type."""
    fits = base.device.type == "cpu" and base.dtype == torch.float32
    if fits and library() is not None:
        return NativeRunner(num_threads)
    return TorchRunner()
