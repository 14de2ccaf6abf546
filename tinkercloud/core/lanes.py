"""Lanes: the operations of each model, one at a time, in the order of their `seq_id`s.

What a lane has run is in its journal: an operation's position there is given when it ends, and goes
on record together with its outcome, in the order of positions.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary

from tinkercloud.core.lane import LaneOrder, Verdict
from tinkercloud.core.pending import Pending, Work
from tinkercloud.storage.futures import FuturesStorage, Outcome, Ticket, failed
from tinkercloud.storage.journal import LanePast

# One client call may be several of these, posted out of order (wire specification, section 10).
CHUNK_KINDS = frozenset({"ForwardBackward", "Forward"})

TOO_LATE = failed(
    "this request arrived after later operations of its model had run; it was not executed, so "
    "send it again with a new seq_id",
    "user",
)


class RecoveryHooks(Protocol):
    """Keeps models over the end of the process that computes them."""

    async def run(self, ticket: Ticket, work: Work) -> Outcome:
        """Run the work of an operation on its model as all operations before it left it."""
        ...

    async def ended(self, ticket: Ticket, position: int, took_s: float) -> None:
        """An operation is on record at this position; no other one of its model runs now."""
        ...

    def unrecorded(self, ticket: Ticket) -> None:
        """The model may have an operation that is not on record: it goes there later, or the
        operation was cancelled, and what computes it may not know that yet."""
        ...


class NoRecovery:
    """Models end with the process that computes them."""

    async def run(self, ticket: Ticket, work: Work) -> Outcome:
        return await work()

    async def ended(self, ticket: Ticket, position: int, took_s: float) -> None:
        return

    def unrecorded(self, ticket: Ticket) -> None:
        return


@dataclass(slots=True, eq=False)
class Lane:
    """first_seq_id: from this number on `seen` says whether a request is new, not the database.
    busy: held while an operation runs and until its outcome is on record. position: of the last
    operation that ran."""

    order: LaneOrder[tuple[Pending, Work]]
    first_seq_id: int
    position: int
    busy: asyncio.Lock = field(repr=False)
    seen: set[int] = field(default_factory=set, repr=False)
    changed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    last_arrival: float = 0.0  # monotonic
    worker: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class LaneCalls:
    """What a lane needs of its manager. run: work to its outcome, never raising. finish: an outcome
    on record; False where it is in memory only. spawn: a task that ends with the manager."""

    run: Callable[[Pending, Work], Awaitable[Outcome]]
    finish: Callable[[Pending, Outcome], Awaitable[bool]]
    spawn: Callable[[Awaitable[None], str], "asyncio.Task[None]"]


class Lanes:
    """gap_grace_s: how long early forward_backwards wait for missing numbers."""

    def __init__(self, futures: FuturesStorage, calls: LaneCalls, *, gap_grace_s: float):
        self._futures = futures
        self._calls = calls
        self._gap_grace_s = gap_grace_s
        self._lanes: dict[tuple[str, str], Lane] = {}
        # Who waits for the lock of a lane that is forgotten waits for that of the next one too.
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._stopping = False
        self.recovery: RecoveryHooks = NoRecovery()

    async def lane(self, user: str, model_id: str) -> Lane:
        key = user, model_id
        lane = self._lanes.get(key)
        if lane is None:
            past = await self._futures.lane_past(user, model_id, CHUNK_KINDS)
            busy = self._locks.setdefault(key, asyncio.Lock())
            # another request may have made the lane while this one read the database
            lane = self._lanes.setdefault(key, _lane_after(past, busy))
        return lane

    def push(self, lane: Lane, pending: Pending, work: Work) -> None:
        ticket = pending.ticket
        assert ticket.seq_id is not None
        lane.order.push(ticket.seq_id, (pending, work), is_chunk=ticket.kind in CHUNK_KINDS)
        lane.last_arrival = time.monotonic()
        lane.changed.set()
        if not self._stopping and (lane.worker is None or lane.worker.done()):
            lane.worker = self._calls.spawn(self._serve(lane), f"lane {ticket.model_id}")

    async def drained(self, user: str, model_id: str) -> bool:
        """Wait until the lane is empty. False where it has operations left, which `stop` keeps for
        the next start."""
        lane = self._lanes.get((user, model_id))
        if lane is None:
            return True
        if lane.worker is not None:
            await asyncio.wait([lane.worker])
        return not len(lane.order)

    def is_idle(self, user: str, model_id: str) -> bool:
        """Whether no operation of the model runs or waits."""
        lane = self._lanes.get((user, model_id))
        return lane is None or not (len(lane.order) or lane.busy.locked())

    def forget(self, user: str, model_id: str) -> None:
        """Of a lane that is drained, and whose model is no more."""
        self._lanes.pop((user, model_id), None)

    @asynccontextmanager
    async def between_operations(self, user: str, model_id: str) -> AsyncGenerator[None]:
        """Holds the lane where no operation of the model runs."""
        lane = await self.lane(user, model_id)
        async with lane.busy:
            yield

    async def stop(self, within_s: float) -> None:
        """Begin no operation any more; wait for those that run, so long at most."""
        self._stopping = True
        workers = [lane.worker for lane in self._lanes.values() if lane.worker is not None]
        for lane in self._lanes.values():
            lane.changed.set()
        if workers:
            await asyncio.wait(workers, timeout=within_s)

    async def _serve(self, lane: Lane) -> None:
        """Run the lane until nothing waits in it."""
        # Nothing is awaited between the last test and the return, so an operation that is pushed
        # either is seen here or finds this worker done and starts another.
        while len(lane.order) and not self._stopping:
            lane.changed.clear()  # before pop: an arrival after it wakes the wait below
            grace_s = lane.last_arrival + self._gap_grace_s - time.monotonic()
            popped = lane.order.pop(give_up=grace_s <= 0)
            if popped is None:
                await wait_for_event(lane.changed, grace_s)
                continue
            (pending, work), verdict = popped
            async with lane.busy:
                if verdict is Verdict.TOO_LATE:
                    await self._calls.finish(pending, TOO_LATE)
                    continue
                try:
                    await self._run(lane, pending, work)
                except asyncio.CancelledError:
                    self.recovery.unrecorded(pending.ticket)
                    raise

    async def _run(self, lane: Lane, pending: Pending, work: Work) -> None:
        began = time.monotonic()
        kept = pending.request is not None
        guarded = (lambda: self.recovery.run(pending.ticket, work)) if kept else work
        outcome = await self._calls.run(pending, guarded)
        if kept:
            lane.position += 1
            pending.position = lane.position
        on_record = await self._calls.finish(pending, outcome)
        if kept and on_record:
            took_s = time.monotonic() - began
            await self.recovery.ended(pending.ticket, lane.position, took_s)
        elif kept:
            self.recovery.unrecorded(pending.ticket)


def _lane_after(past: LanePast, busy: asyncio.Lock) -> Lane:
    order: LaneOrder[tuple[Pending, Work]] = LaneOrder(past.next_seq_id, past.last_ordered)
    return Lane(order, past.first_new_seq_id, past.position, busy)


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
