"""The order in which one model's operations run. Pure: no clock, no tasks, no I/O.

Operations carry `seq_id`s that count up by one per POST, but POSTs overtake each other and some
numbers never arrive (wire specification, section 10). `pop` decides which operation may run now:

- the next number in line runs;
- an early one waits for the numbers before it, unless they are lost for good: a client posts an
  operation other than forward_backward only after all earlier POSTs were answered or given up, so
  such an operation with number k proves that every missing number below k is lost. Where only
  forward_backward chunks wait, nothing proves it, and the caller gives up after a grace time;
- a late one (its number was given up) still runs if it is a forward_backward and only
  forward_backwards ran past it: gradients are summed, in any order.
"""

import heapq
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Verdict(Enum):
    RUN = "run"
    TOO_LATE = "too late"


@dataclass(order=True, slots=True)
class _Waiting(Generic[Item]):
    seq_id: int
    is_chunk: bool = field(compare=False)
    item: Item = field(compare=False)


class LaneOrder(Generic[Item]):
    """chunk: a forward_backward or forward, several of which may make up one client call.
    last_ordered: the highest number of an executed operation that is no chunk; -1: none."""

    def __init__(self, next_seq_id: int, last_ordered: int = -1):
        self._next = next_seq_id  # every smaller number has run or was given up
        self._waiting: list[_Waiting[Item]] = []
        self._proof = -1  # highest number of an arrived operation that is no chunk
        self._last_ordered = last_ordered
        self._highest = next_seq_id - 1

    def __len__(self) -> int:
        return len(self._waiting)

    def number(self, seq_id: int | None) -> int:
        """The number of a new operation: its own, or the one after the highest seen."""
        number = self._highest + 1 if seq_id is None else seq_id
        self._highest = max(self._highest, number)
        return number

    def push(self, seq_id: int, item: Item, *, is_chunk: bool) -> None:
        heapq.heappush(self._waiting, _Waiting(seq_id, is_chunk, item))
        self._highest = max(self._highest, seq_id)
        if not is_chunk:
            self._proof = max(self._proof, seq_id)

    def pop(self, *, give_up: bool = False) -> tuple[Item, Verdict] | None:
        """The operation to run (or to refuse) now; None: nothing may run yet.

        give_up: the missing numbers before the first waiting operation are lost.
        """
        if not self._waiting:
            return None
        first = self._waiting[0]
        late = first.seq_id < self._next
        if first.seq_id > self._next and not give_up and self._proof < first.seq_id:
            return None
        heapq.heappop(self._waiting)
        if late and (not first.is_chunk or self._last_ordered > first.seq_id):
            return first.item, Verdict.TOO_LATE
        self._next = max(self._next, first.seq_id + 1)
        if not first.is_chunk:
            self._last_ordered = max(self._last_ordered, first.seq_id)
        return first.item, Verdict.RUN
