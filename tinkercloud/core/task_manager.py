"""Runs the requests that it accepts, and records their outcomes.

A request is acknowledged when its row is on disk, then runs, then its outcome is on disk, then
waiting polls are woken. Training requests of one model share a lane and run one at a time in
`seq_id` order; everything else runs at once.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from dataclasses import replace

from tinkercloud.core.lanes import LaneCalls, Lanes, wait_for_event
from tinkercloud.core.outcome_recorder import Changes, OutcomeRecorder
from tinkercloud.core.pending import Admission, Pending, Resume, Work
from tinkercloud.core.pending_requests import PendingRequests, is_sampling
from tinkercloud.errors import (
    NO_WRITES,
    FutureUnknown,
    StorageFailed,
    TinkercloudError,
    UserError,
)
from tinkercloud.logs import about, session_of
from tinkercloud.storage.futures import (
    RESTARTED,
    SAMPLING_KIND,
    FuturesStorage,
    Kept,
    Outcome,
    Ticket,
    failed,
)

logger = logging.getLogger(__name__)

OnFinish = Callable[[Pending], None]

STOPPED = failed("the server was stopped before this operation finished", "server")
CANCELLED = failed("this sample was cancelled by its client; send it again to have it", "user")
SESSION_ENDED = failed(
    "this sample was cancelled because its session has ended; sample in a new session", "user"
)
NO_ROOM = (
    "the server's data folder cannot be written; this operation has ended, and its result comes "
    "when the operator has made room"
)
DEFECT = "the server failed on this operation in a way that it should not; see the server's log"


def _log_about(pending: Pending) -> None:
    ticket = pending.ticket
    about(
        request_id=pending.request_id,
        kind=ticket.kind,
        user=ticket.user,
        session_id=session_of(ticket.model_id or ticket.sampler_id),
        model_id=ticket.model_id,
        sampler_id=ticket.sampler_id,
        seq_id=ticket.seq_id,
    )


_running: ContextVar[Pending] = ContextVar("the request that this task works on")


class TaskManager:
    """gap_grace_s: how long early forward_backwards wait for missing numbers."""

    def __init__(self, futures: FuturesStorage, *, gap_grace_s: float):
        self._futures = futures
        self._requests = PendingRequests(futures)
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_finish: list[OnFinish] = []
        self._resume: dict[str, Resume] = {}  # by kind
        self.outcomes = OutcomeRecorder(futures, self._settle, self.spawn)
        calls = LaneCalls(self._outcome_of, self._finish, self.spawn)
        self.lanes = Lanes(futures, calls, gap_grace_s=gap_grace_s)

    def use_admission(self, admission: Admission) -> None:
        """From now on it says who may have how much underway."""
        self._requests.admission = admission

    def when_finished(self, listener: OnFinish) -> None:
        """The listener gets each request once its outcome is on record."""
        self._on_finish.append(listener)

    def resume(self, kind: str, work_of: Resume) -> None:
        """work_of: makes the work of a request of this kind again. Its work may run twice, and
        must give the same result then."""
        self._resume[kind] = work_of

    def journal(self, kind: str, work_of: Resume, changes: Changes) -> None:
        """The same of operations of lanes; the model's journal keeps those that change it."""
        self._resume[kind] = work_of
        self.outcomes.journal(kind, changes)

    async def start(self) -> None:
        """Settle what the previous process left pending: it begins again where its request was
        kept, and fails where not."""
        await self._futures.fail_pending(RESTARTED)
        for kept in await self._futures.pending():
            await self._begin_again(kept)

    async def close(self) -> None:
        """Stop all work. What has not finished begins again at the next start where its request
        was kept, and fails with category "server" where not."""
        self._requests.is_closed = True
        self.outcomes.stop()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pending in self._requests:
            pending.finished.set()  # polls are answered: "try again"
        await self.outcomes.record_late()
        left = [p for p in self._requests if p.outcome is None and p.request is None]
        await asyncio.gather(*(self._finish(pending, STOPPED) for pending in left))

    @property
    def is_closing(self) -> bool:
        """What is spawned now would outlive the manager."""
        return self._requests.is_closed

    @property
    def num_pending(self) -> int:
        return len(self._requests)

    def pending(self) -> list[Pending]:
        """What was acknowledged and has no outcome on record."""
        return list(self._requests)

    # accepting

    async def submit(self, ticket: Ticket, work: Work, request: bytes | None = None) -> str:
        """Acknowledge and run at once, in no lane. Returns the request id.

        request: kept until the work has ended, for `resume`.
        """
        assert request is None or ticket.kind in self._resume
        pending, is_new = await self._requests.accept(ticket, request)
        if is_new:
            self._start(pending, work)
        return pending.request_id

    async def refuse(self, ticket: Ticket, error: TinkercloudError) -> str:
        """Acknowledge a request that fails: in one write with its failure, so that no end of the
        process can give it another. Returns the request id."""
        outcome = failed(str(error), error.category)
        pending, is_new = await self._requests.accept(ticket, None, outcome=outcome)
        if is_new:
            self._settle(pending)
        return pending.request_id

    async def submit_in_lane(self, ticket: Ticket, work: Work, request: bytes | None = None) -> str:
        """Acknowledge and run in the lane of ticket.model_id, at its seq_id.

        seq_id None: after everything that has arrived so far. request: for `journal`. Returns the
        request id.
        """
        assert ticket.model_id is not None
        assert request is None or self.outcomes.is_journalled(ticket.kind)
        lane = await self.lanes.lane(ticket.user, ticket.model_id)
        if ticket.seq_id is None:  # refused later, its number would be missing
            self._requests.admission.require(ticket.user)
        ticket = replace(ticket, seq_id=lane.order.number(ticket.seq_id))
        assert ticket.seq_id is not None
        # No await between test and add: a repeated POST of this number would count as new too.
        certainly_new = ticket.seq_id >= lane.first_seq_id and ticket.seq_id not in lane.seen
        lane.seen.add(ticket.seq_id)
        pending, is_new = await self._requests.accept(
            ticket, request, in_lane=True, check_database=not certainly_new
        )
        if is_new:
            self.lanes.push(lane, pending, work)
            await asyncio.sleep(0)  # the work begins before the answer is built and sent
        return pending.request_id

    def _start(self, pending: Pending, work: Work) -> None:
        pending.task = self.spawn(self._run(pending, work), f"run {pending.request_id}")

    async def _begin_again(self, kept: Kept) -> None:
        ticket, pending = kept.ticket, self._requests.restore(kept)

        async def work() -> Outcome:
            remade = await self._resume[ticket.kind](ticket, kept.request)
            return await remade()

        if not kept.in_lane:
            self._start(pending, work)
            return
        assert ticket.model_id is not None
        self.lanes.push(await self.lanes.lane(ticket.user, ticket.model_id), pending, work)

    def works_on(self, subject: str) -> None:
        """Called by work: the model or version that its request is for."""
        running = _running.get(None)
        if running is not None:
            running.subject = subject

    def running_request_id(self) -> str:
        """Called by work: the request that it is for."""
        return _running.get().request_id

    def delay_of(self, request_id: str) -> str | None:
        """Why a request that has ended has no outcome yet."""
        pending = self._requests.find(request_id)
        return NO_ROOM if pending is not None and self.outcomes.is_late(pending) else None

    def subject_of(self, request_id: str) -> str | None:
        """The model or version that a pending request is for; None where it is not known."""
        pending = self._requests.find(request_id)
        return None if pending is None else pending.subject

    # running

    def spawn(self, work: Awaitable[None], name: str) -> asyncio.Task[None]:
        """Run something that ends with the manager."""
        task = asyncio.ensure_future(work)
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, pending: Pending, work: Work) -> None:
        await self._finish(pending, await self._outcome_of(pending, work))

    async def _outcome_of(self, pending: Pending, work: Work) -> Outcome:
        _running.set(pending)
        _log_about(pending)
        pending.started_at = time.time()
        try:
            return await work()
        except asyncio.CancelledError:
            if pending.request is None or not self._requests.is_closed:
                # recorded even now: a row left pending would have no outcome until the next start
                await asyncio.shield(self._finish(pending, STOPPED))
            raise
        except TinkercloudError as error:
            logger.info("%s failed: %s", pending.request_id, error)
            return failed(str(error), error.category)
        except OSError as error:
            logger.error("%s (%s) failed: %s", pending.request_id, pending.ticket.kind, error)
            if error.errno not in NO_WRITES:
                return failed(DEFECT, "server")
            return failed(str(StorageFailed(str(error.strerror))), "server")
        except Exception:  # whatever a backend may throw: the waiting client must get an answer
            logger.exception("%s (%s) failed", pending.request_id, pending.ticket.kind)
            return failed(DEFECT, "server")

    async def _finish(self, pending: Pending, outcome: Outcome) -> bool:
        """Whether it is on record. Polls are answered from then on, not before: after a crash an
        operation without an outcome begins again, and may end otherwise."""
        if pending.outcome is not None:
            return False
        pending.outcome, pending.ended_at = outcome, time.time()
        return await self.outcomes.put(pending)

    def _settle(self, pending: Pending) -> None:
        """Answer waiting polls; later ones read the database."""
        assert pending.outcome is not None
        self._requests.forget(pending)
        pending.finished.set()
        for listener in self._on_finish:
            listener(pending)
        if logger.isEnabledFor(logging.DEBUG):
            took_s = time.time() - pending.accepted_at
            logger.debug("%s %s in %.3f s", pending.ticket.kind, pending.outcome.status, took_s)

    # cancelling

    async def cancel(self, request_id: str, user: str) -> None:
        """End a pending sample: its future fails now and its work is cancelled. What has finished
        stays as it is.

        Raises FutureUnknown, and UserError for a training operation: those are ordered, and a
        client that lost one would go on with weights that it does not know.
        """
        pending = self._requests.find_of(user, request_id)
        if pending is None:
            if await self._futures.outcome(request_id, user) is None:
                raise FutureUnknown(request_id, sampling=is_sampling(request_id))
            return
        if pending.ticket.kind != SAMPLING_KIND or pending.task is None:
            raise UserError(
                f"{pending.ticket.kind} cannot be cancelled, only samples can; wait for it, or "
                "finish the session to drop its models"
            )
        await self._end_sample(pending, CANCELLED)

    async def cancel_session_samples(self, user: str, sampler_ids: Collection[str]) -> None:
        """End all pending samples of these samplers: nobody reads them any more."""
        pending = [
            each
            for each in self._requests
            if each.ticket.sampler_id in sampler_ids and each.ticket.user == user
        ]
        await asyncio.gather(*(self._end_sample(each, SESSION_ENDED) for each in pending))

    async def _end_sample(self, pending: Pending, outcome: Outcome) -> None:
        """Nothing where it has ended, or has not begun: its work sees to that."""
        if pending.task is not None and pending.outcome is None:
            await self._finish(pending, outcome)  # first, so that it is not read as a stop
            pending.task.cancel()

    # waiting

    async def wait(self, request_id: str, user: str, hold_s: float) -> Outcome | None:
        """The outcome, waited for at most hold_s; None: still pending.

        Raises FutureUnknown. The database is not read while the request is pending.
        """
        pending = self._requests.find_of(user, request_id)
        if pending is not None:
            await wait_for_event(pending.finished, hold_s)
            return None if request_id in self._requests else pending.outcome
        outcome = await self._futures.outcome(request_id, user)
        if outcome is None:
            status = await self._futures.on_record(request_id)
            logger.warning("%s asked for %r, which is %s", user, request_id, status)
            raise FutureUnknown(request_id, sampling=is_sampling(request_id))
        return outcome
