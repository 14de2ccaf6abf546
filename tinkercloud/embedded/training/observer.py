"""Who looks on while a pass trains: states and laws go by that cost a pass of their own elsewhere.

Axes: T packed rows of the pass, n some of them, D hidden, V vocabulary.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from tinkercloud.core.types import TrainBatch
from tinkercloud.embedded.training.layout import Layout

logger = logging.getLogger(__name__)

Datums = tuple[TrainBatch, Sequence[int]]
"""A share's batch, and the indices of its datums in the pass."""


class Witness(Protocol):
    """Of one pass. What it is shown is the pass's own: to be copied, never to be changed."""

    def begin(self, shares: Sequence[Datums], layout: Layout) -> None: ...

    def block(self, number: int, x: Tensor) -> None:
        """x (T, D): what block `number` put out, the first being 1; of the last one, what follows
        the final norm."""
        ...

    def laws(self, rows: Tensor, probs: Tensor) -> None:
        """rows int64 (n,) of the pass, each once in all; probs float32 (n, V) at temperature 1."""
        ...

    def end(self) -> None:
        """All rows were shown; the backward half of the pass follows."""
        ...


class Careful:
    """A witness whose failure is nobody else's: it is told once, and shown nothing more."""

    def __init__(self, witness: Witness | None):
        self._witness = witness

    def begin(self, shares: Sequence[Datums], layout: Layout) -> None:
        self._tried(lambda witness: witness.begin(shares, layout))

    def block(self, number: int, x: Tensor) -> None:
        self._tried(lambda witness: witness.block(number, x))

    def laws(self, rows: Tensor, probs: Tensor) -> None:
        self._tried(lambda witness: witness.laws(rows, probs))

    def end(self) -> None:
        self._tried(lambda witness: witness.end())

    def _tried(self, show: Callable[[Witness], None]) -> None:
        if self._witness is None:
            return
        try:
            show(self._witness)
        except Exception:
            logger.exception("a training pass could not be looked on; it goes on by itself")
            self._witness = None
