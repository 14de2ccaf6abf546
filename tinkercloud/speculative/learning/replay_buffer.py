"""What a draft learns from, bounded: so many bytes, no older than so many versions."""

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
    """Items in the order they came; the oldest is dropped first.

    dropped: called with every item that leaves, for whoever keeps something along with it.
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
        """Drop what was written before the version number `before`."""
        items, self._items = self._items, deque()
        for item, num_bytes in items:
            if item.epoch >= before:
                self._items.append((item, num_bytes))
            else:
                self.num_bytes -= num_bytes
                self._dropped(item)


def sample_mix(
    first: list[T], second: list[T], count: int, share: float, generator: np.random.Generator
) -> list[T]:
    """`count` items, `share` of them of the first list, with replacement; all of one list where the
    other is empty, none where both are. The same for a generator of the same seed."""
    if not first and not second:
        return []
    if not first or not second:
        share = 1.0 if first else 0.0
    of_first = round(count * share)
    chosen = [first[i] for i in generator.integers(0, max(len(first), 1), of_first)]
    chosen += [second[i] for i in generator.integers(0, max(len(second), 1), count - of_first)]
    return chosen
