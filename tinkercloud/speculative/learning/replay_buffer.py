"""What a draft learns from, kept within bounds: so many bytes, no older than so many versions."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np


class Aged(Protocol):
    """epoch: how many versions of the policy had been published when it was written."""

    @property
    def epoch(self) -> int: ...


T = TypeVar("T", bound=Aged)


class ReplayBuffer(Generic[T]):
    """Items in the order they came; the oldest goes first.

    dropped: told of every item that leaves, for whoever keeps something beside it.
    """

    def __init__(self, max_bytes: int, dropped: Callable[[T], None] = lambda item: None):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._items: deque[tuple[T, int]] = deque()
        self._dropped = dropped

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return (item for item, _ in self._items)

    def add(self, item: T, num_bytes: int) -> None:
        self._items.append((item, num_bytes))
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        item, num_bytes = self._items.popleft()
        self.num_bytes -= num_bytes
        self._dropped(item)

    def expire(self, before: int) -> None:
        """Forget what was written before the version number `before`."""
        kept = deque(pair for pair in self._items if pair[0].epoch >= before)
        gone = [item for item, _ in self._items if item.epoch < before]
        self._items = kept
        self.num_bytes = sum(num_bytes for _, num_bytes in kept)
        for item in gone:
            self._dropped(item)


def sample_mix(
    first: list[T], second: list[T], count: int, share: float, generator: np.random.Generator
) -> list[T]:
    """`count` items, `share` of them of the first list, with replacement; all of one list where the
    other is empty, none where both are. A seeded generator makes it the same every time."""
    if not first or not second:
        share = 1.0 if first else 0.0
    if not first and not second:
        return []
    of_first = round(count * share)
    chosen = [first[i] for i in generator.integers(0, max(len(first), 1), of_first)]
    chosen += [second[i] for i in generator.integers(0, max(len(second), 1), count - of_first)]
    return chosen
