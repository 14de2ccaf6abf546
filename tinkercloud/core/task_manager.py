"""Accepts requests, runs them, records their outcomes.

A request is acknowledged when its row is on disk, then runs, then its outcome is on disk, then
waiting polls are woken. Training requests of one model share a lane and run one at a time in
`seq_id` order; everything else runs at once.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from tinkercloud.core.lane import LaneOrder, Verdict
from tinkercloud.errors import (
    FutureUnknown,
    ServerFault,
    StorageFailed,
    TinkercloudError,
    UserError,
)
from tinkercloud.storage.futures import RESTARTED, FuturesStorage, Kept, Outcome, Ticket, failed

logger = logging.getLogger(__name__)

Work = Callable[[], Awaitable[Outcome]]
Resume = Callable[[Ticket, bytes], Awaitable[Work]]
OnFinish = Callable[[str, Ticket, Outcome], None]

SAMPLING_KIND = "Sample"
# One client call may be several of these, posted out of order (wire specification, section 10).
CHUNK_KINDS = frozenset({"ForwardBackward", "Forward"})
RECORD_AGAIN_S = 2.0
_TRAIN_PREFIX, _SAMPLE_PREFIX = "train-", "sample-"

TOO_LATE = failed(
    "this request arrived after later operations of its model had run; it was not executed, so "
    "send it again with a new seq_id",
    "user",
)
STOPPED = failed("the server was stopped before this operation finished", "server")
CANCELLED = failed("this sample was cancelled by its client; send it again to have it", "user")
DEFECT = "the server failed on this operation in a way that it should not; see the server's log"


def is_sampling(request_id: str) -> bool:
    """By the request id alone: a poll for a forgotten one is answered 410 for a sample, else 404
    (wire specification, section 4.4)."""
    return request_id.startswith(_SAMPLE_PREFIX)


@dataclass(slots=True, eq=False)
class _Pending:
    request_id: str
    ticket: Ticket
    acknowledged: asyncio.Future[str] = field(repr=False)
    finished: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    outcome: Outcome | None = field(default=None, repr=False)
    subject: str | None = None  # a model or a version
    started_at: float | None = None
    request: bytes | None = field(default=None, repr=False)
    task: asyncio.Task[None] | None = None  # of work in no lane: it can be cancelled alone


_running: ContextVar[_Pending] = ContextVar("the request that this task works on")


@dataclass(slots=True, eq=False)
class _Lane:
    order: LaneOrder[tuple[_Pending, Work]]
    first_seq_id: int  # from this number on `seen` says whether a request is new, not the database
    seen: set[int] = field(default_factory=set, repr=False)
    changed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    last_arrival: float = 0.0  # monotonic
    worker: asyncio.Task[None] | None = None


class TaskManager:
    """gap_grace_s: how long early forward_backwards wait for missing numbers."""

    def __init__(self, futures: FuturesStorage, *, gap_grace_s: float):
        self._futures = futures
        self._gap_grace_s = gap_grace_s
        self._pending: dict[str, _Pending] = {}
        self._by_key: dict[str, _Pending] = {}
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_finish: list[OnFinish] = []
        self._resume: dict[str, Resume] = {}  # by kind
        self._closing = False

    def when_finished(self, listener: OnFinish) -> None:
        """The listener gets (request_id, ticket, outcome) once the outcome is on record."""
        self._on_finish.append(listener)

    def resume(self, kind: str, work_of: Resume) -> None:
        """work_of: makes the work of a request of this kind again, from its ticket and from what
        was kept of it. Its work may run twice, and must give the same result then."""
        self._resume[kind] = work_of

    async def start(self) -> None:
        """Settle what the previous process left pending: it begins again where its request was
        kept, and fails where not."""
        await self._futures.fail_pending(RESTARTED)
        for kept in await self._futures.pending():
            self._begin_again(kept)

    async def close(self) -> None:
        """Stop all work. What has not finished begins again at the next start where its request
        was kept, and fails with category "server" where not."""
        self._closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pending in self._pending.values():
            pending.finished.set()  # polls are answered: without an outcome, "try again"
        left = list(self._pending.values())
        late = [self._put_on_record(p, p.outcome) for p in left if p.outcome is not None]
        lost = [self._finish(p, STOPPED) for p in left if p.outcome is None and p.request is None]
        await asyncio.gather(*late, *lost)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    # accepting

    async def submit(self, ticket: Ticket, work: Work, request: bytes | None = None) -> str:
        """Acknowledge and run at once, in no lane. Returns the request id.

        request: kept until the work has ended, for `resume`.
        """
        assert request is None or ticket.kind in self._resume
        pending, is_new = await self._accept(ticket, request)
        if is_new:
            self._start(pending, work)
        return pending.request_id

    async def submit_in_lane(self, ticket: Ticket, work: Work) -> str:
        """Acknowledge and run in the lane of ticket.model_id, at its seq_id.

        seq_id None: after everything that has arrived so far. Returns the request id.
        """
        assert ticket.model_id is not None
        lane = await self._lane(ticket.user, ticket.model_id)
        ticket = _numbered(ticket, lane)
        assert ticket.seq_id is not None
        # No await between test and add: a repeated POST of this number would count as new too.
        certainly_new = ticket.seq_id >= lane.first_seq_id and ticket.seq_id not in lane.seen
        lane.seen.add(ticket.seq_id)
        pending, is_new = await self._accept(ticket, check_database=not certainly_new)
        if is_new:
            lane.order.push(ticket.seq_id, (pending, work), is_chunk=ticket.kind in CHUNK_KINDS)
            lane.last_arrival = time.monotonic()
            lane.changed.set()
            if lane.worker is None or lane.worker.done():
                lane.worker = self._spawn(self._serve(lane), f"lane {ticket.model_id}")
            await asyncio.sleep(0)  # the work begins before the answer is built and sent
        return pending.request_id

    async def drain(self, user: str, model_id: str) -> None:
        """Wait until the lane is empty, then forget it."""
        lane = self._lanes.get((user, model_id))
        if lane is not None and lane.worker is not None:
            await asyncio.wait([lane.worker])
        self._lanes.pop((user, model_id), None)

    def spawn(self, work: Awaitable[None], name: str) -> None:
        """Run something that nobody waits for; it ends with the manager."""
        self._spawn(work, name)

    def _start(self, pending: _Pending, work: Work) -> None:
        pending.task = self._spawn(self._run(pending, work), f"run {pending.request_id}")

    def _begin_again(self, kept: Kept) -> None:
        pending = _Pending(kept.request_id, kept.ticket, asyncio.get_running_loop().create_future())
        pending.acknowledged.set_result(kept.request_id)
        pending.subject, pending.request = kept.ticket.model_id, kept.request
        self._pending[kept.request_id] = pending
        if kept.ticket.dedup_key is not None:
            self._by_key[kept.ticket.dedup_key] = pending

        async def work() -> Outcome:
            remade = await self._resume[kept.ticket.kind](kept.ticket, kept.request)
            return await remade()

        self._start(pending, work)

    async def _accept(
        self, ticket: Ticket, request: bytes | None = None, *, check_database: bool = True
    ) -> tuple[_Pending, bool]:
        """The request's record, and whether it is new. On record when this returns.

        check_database False: no earlier request can have the key.
        """
        if self._closing:
            raise ServerFault("the server is shutting down")
        key = ticket.dedup_key
        original = self._by_key.get(key) if key is not None else None
        if original is not None:
            # shielded: a repeat whose client goes away must not cancel the original's future
            await asyncio.shield(original.acknowledged)
            return original, False
        prefix = _SAMPLE_PREFIX if ticket.kind == SAMPLING_KIND else _TRAIN_PREFIX
        loop = asyncio.get_running_loop()
        pending = _Pending(prefix + uuid.uuid4().hex, ticket, loop.create_future())
        pending.subject, pending.request = ticket.model_id, request
        if key is not None:
            self._by_key[key] = pending  # before the first await, so that a repeat finds it
        try:
            is_new = await self._record(pending, check_database=check_database)
        except BaseException as error:
            self._forget(pending)
            if not isinstance(error, Exception):
                pending.acknowledged.cancel()
                raise
            pending.acknowledged.set_exception(error)
            pending.acknowledged.exception()  # retrieved: perhaps no repeat waits for it
            raise
        pending.acknowledged.set_result(pending.request_id)
        if not is_new:
            self._forget(pending)
        return pending, is_new

    async def _record(self, pending: _Pending, *, check_database: bool) -> bool:
        """Write the row; False where an earlier request has the key (its id is taken over)."""
        key = pending.ticket.dedup_key
        earlier = None
        if check_database and key is not None:
            earlier = await self._futures.find(key)
        if earlier is not None:
            pending.request_id = earlier
            return False
        await self._futures.add(pending.request_id, pending.ticket, pending.request)
        self._pending[pending.request_id] = pending
        return True

    def _forget(self, pending: _Pending) -> None:
        self._pending.pop(pending.request_id, None)
        key = pending.ticket.dedup_key
        if key is not None and self._by_key.get(key) is pending:
            del self._by_key[key]

    async def _lane(self, user: str, model_id: str) -> _Lane:
        lane = self._lanes.get((user, model_id))
        if lane is None:
            highest = await self._futures.highest_seq_id(user, model_id)
            first = 0 if highest is None else highest + 1
            fresh = _Lane(LaneOrder(first), first)
            # another request may have made the lane while this one read the database
            lane = self._lanes.setdefault((user, model_id), fresh)
        return lane

    def works_on(self, subject: str) -> None:
        """Called by work: the model or version that its request is for."""
        running = _running.get(None)
        if running is not None:
            running.subject = subject

    def running_request_id(self) -> str:
        """Called by work: the request that it is for."""
        return _running.get().request_id

    def subject_of(self, request_id: str) -> str | None:
        """The model or version that a pending request is for; None where it is not known."""
        pending = self._pending.get(request_id)
        return None if pending is None else pending.subject

    # running

    def _spawn(self, work: Awaitable[None], name: str) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, lane: _Lane) -> None:
        """Run the lane until nothing waits in it."""
        # Nothing is awaited between the last test and the return, so an operation that is pushed
        # either is seen here or finds this worker done and starts another.
        while len(lane.order):
            lane.changed.clear()  # before pop: an arrival after it wakes the wait below
            grace_s = lane.last_arrival + self._gap_grace_s - time.monotonic()
            popped = lane.order.pop(give_up=grace_s <= 0)
            if popped is None:
                await _wait(lane.changed, grace_s)
                continue
            (pending, work), verdict = popped
            if verdict is Verdict.TOO_LATE:
                await self._finish(pending, TOO_LATE)
            else:
                await self._run(pending, work)

    async def _run(self, pending: _Pending, work: Work) -> None:
        _running.set(pending)
        pending.started_at = time.time()
        try:
            outcome = await work()
        except asyncio.CancelledError:
            if pending.request is None or not self._closing:
                # recorded even now: a row left pending would have no outcome until the next start
                await asyncio.shield(self._finish(pending, STOPPED))
            raise
        except TinkercloudError as error:
            logger.info("%s failed: %s", pending.request_id, error)
            outcome = failed(str(error), error.category)
        except Exception:  # whatever a backend may throw: the waiting client must get an answer
            logger.exception("%s (%s) failed", pending.request_id, pending.ticket.kind)
            outcome = failed(DEFECT, "server")
        await self._finish(pending, outcome)

    async def _finish(self, pending: _Pending, outcome: Outcome) -> None:
        if pending.outcome is not None:
            return
        pending.outcome = outcome
        try:
            await self._put_on_record(pending, outcome)
        finally:  # waiting polls are answered even where the disk is full
            pending.finished.set()
            for listener in self._on_finish:
                listener(pending.request_id, pending.ticket, outcome)

    async def _put_on_record(self, pending: _Pending, outcome: Outcome) -> None:
        """The row, then `_forget`: from then on polls read the database. Where the disk takes no
        writes the lane goes on, polls are answered from memory, and the row comes later."""
        try:
            await self._futures.finish(pending.request_id, outcome, pending.started_at)
        except StorageFailed as error:
            logger.error("the outcome of %s is in memory: %s", pending.request_id, error)
            if not self._closing:
                self._spawn(self._put_on_record_later(pending, outcome), "late outcome")
            return
        except Exception:  # our defect; the lane must go on
            logger.exception("the outcome of %s was not recorded", pending.request_id)
        self._forget(pending)

    async def _put_on_record_later(self, pending: _Pending, outcome: Outcome) -> None:
        await asyncio.sleep(RECORD_AGAIN_S)
        await self._put_on_record(pending, outcome)

    # cancelling

    async def cancel(self, request_id: str, user: str) -> None:
        """End a pending sample: its future fails now and its work is cancelled. What has finished
        stays as it is.

        Raises FutureUnknown, and UserError for a training operation: those are ordered, and a
        client that lost one would go on with weights that it does not know.
        """
        pending = self._pending.get(request_id)
        if pending is None or pending.ticket.user != user:
            if await self._futures.outcome(request_id, user) is None:
                raise FutureUnknown(request_id, sampling=is_sampling(request_id))
            return
        if pending.ticket.kind != SAMPLING_KIND or pending.task is None:
            raise UserError(
                f"{pending.ticket.kind} cannot be cancelled, only samples can; wait for it, or "
                "finish the session to drop its models"
            )
        if pending.outcome is None:
            await self._finish(pending, CANCELLED)  # first, so that it is not read as a stop
            pending.task.cancel()

    # waiting

    async def wait(self, request_id: str, user: str, hold_s: float) -> Outcome | None:
        """The outcome, waited for at most hold_s; None: still pending.

        Raises FutureUnknown. The database is not read while the request is pending.
        """
        pending = self._pending.get(request_id)
        if pending is not None and pending.ticket.user == user:
            await _wait(pending.finished, hold_s)
            return pending.outcome if pending.finished.is_set() else None
        outcome = await self._futures.outcome(request_id, user)
        if outcome is None:
            status = await self._futures.on_record(request_id)
            logger.warning("%s asked for %r, which is %s", user, request_id, status)
            raise FutureUnknown(request_id, sampling=is_sampling(request_id))
        return outcome


def _numbered(ticket: Ticket, lane: _Lane) -> Ticket:
    return replace(ticket, seq_id=lane.order.number(ticket.seq_id))


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
