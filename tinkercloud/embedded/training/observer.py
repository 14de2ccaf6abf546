"""Observers of training passes: a pass computes hidden states and distributions that drafts can
learn from, and that would cost a pass of their own elsewhere.

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


class PassObserver(Protocol):
    """Of one pass. The tensors belong to the pass, which goes on to use them: an observer copies
    what it keeps and changes nothing."""

    def begin(self, shares: Sequence[Datums], layout: Layout) -> None: ...

    def block(self, number: int, x: Tensor) -> None:
        """x (T, D): the output of block `number`, counted from 1; for the last block, the output
        of the final norm."""
        ...

    def distributions(self, rows: Tensor, probs: Tensor) -> None:
        """rows int64 (n,) of the pass, each row once over all calls; probs float32 (n, V) at
        temperature 1."""
        ...

    def end(self) -> None:
        """All rows were shown; the backward half of the pass follows."""
        ...


class ErrorIsolatingObserver:
    """Forwards to an observer until it raises: the error is logged once, the observer is dropped,
    and the pass goes on. A draft that cannot learn must not fail a client's training call."""

    def __init__(self, observer: PassObserver | None):
        self._observer = observer

    @property
    def watches(self) -> bool:
        return self._observer is not None

    def begin(self, shares: Sequence[Datums], layout: Layout) -> None:
        self._notify(lambda observer: observer.begin(shares, layout))

    def block(self, number: int, x: Tensor) -> None:
        self._notify(lambda observer: observer.block(number, x))

    def distributions(self, rows: Tensor, probs: Tensor) -> None:
        self._notify(lambda observer: observer.distributions(rows, probs))

    def end(self) -> None:
        self._notify(lambda observer: observer.end())

    def _notify(self, event: Callable[[PassObserver], None]) -> None:
        if self._observer is None:
            return
        try:
            event(self._observer)
        except Exception:  # the pass must not fail with who watches it
            logger.exception("the observer of a training pass failed; the pass goes on without it")
            self._observer = None
