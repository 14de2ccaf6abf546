"""Outcomes on record, in the order in which they came.

What the disk has no room for waits in memory, and everything after it: operations of one lane must
go on record in their order.
"""

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from tinkercloud.core.pending import Pending
from tinkercloud.errors import StorageFailed
from tinkercloud.storage.futures import FuturesStorage, Outcome, Ticket
from tinkercloud.storage.journal import Ran

logger = logging.getLogger(__name__)

Changes = Callable[[Ticket, Outcome], bool]
"""Whether an operation of a lane that ended so has changed its model."""

RECORD_AGAIN_S = 2.0


class Spawn(Protocol):
    def __call__(self, work: Awaitable[None], name: str) -> object: ...


class OutcomeRecorder:
    """settle: called with a request once its outcome is on record. spawn: begins a task."""

    def __init__(self, futures: FuturesStorage, settle: Callable[[Pending], None], spawn: Spawn):
        self._futures = futures
        self._settle = settle
        self._spawn = spawn
        self._late: deque[Pending] = deque()
        self._none_is_late = asyncio.Event()
        self._none_is_late.set()
        self._recording = asyncio.Lock()
        self._changes: dict[str, Changes] = {}  # by kind
        self._closing = False

    def journal(self, kind: str, changes: Changes) -> None:
        """The model's journal keeps operations of this kind that change it."""
        self._changes[kind] = changes

    def is_journalled(self, kind: str) -> bool:
        return kind in self._changes

    def is_late(self, pending: Pending) -> bool:
        return pending in self._late

    async def put(self, pending: Pending) -> bool:
        """The row, then `settle`. False: it is late."""
        if self._late:
            self._late.append(pending)
            return False
        try:
            await self._write(pending)
        except StorageFailed as error:
            logger.error("the outcome of %s waits: %s", pending.request_id, error)
            self._late.append(pending)
            if self._none_is_late.is_set() and not self._closing:
                self._spawn(self._record_late_forever(), "late outcomes")
            self._none_is_late.clear()
            return False
        except Exception:  # our defect; the lane must go on
            logger.exception("the outcome of %s was not recorded", pending.request_id)
        self._settle(pending)
        return True

    async def recorded(self) -> None:
        """Until no outcome is in memory only: a model that is brought back before would be without
        the operations that have ended so."""
        await self._none_is_late.wait()

    def stop(self) -> None:
        """Begin no task from now on."""
        self._closing = True

    async def record_late(self) -> None:
        """What is late, oldest first, as far as the disk takes it."""
        async with self._recording:  # or the second writes the first one's, and takes the next off
            try:
                while self._late:
                    await self._write(self._late[0])
                    self._settle(self._late.popleft())
                self._none_is_late.set()
            except StorageFailed as error:
                logger.error("%d outcomes wait: %s", len(self._late), error)

    async def _record_late_forever(self) -> None:
        while self._late:
            await asyncio.sleep(RECORD_AGAIN_S)
            await self.record_late()

    async def _write(self, pending: Pending) -> None:
        assert pending.outcome is not None
        await self._futures.finish(
            pending.request_id, pending.outcome, pending.started_at, self._ran(pending)
        )

    def _ran(self, pending: Pending) -> Ran | None:
        """None: no journal has it."""
        changes = self._changes.get(pending.ticket.kind)
        if changes is None or pending.request is None:
            return None
        outcome = pending.outcome
        assert outcome is not None
        if pending.position is None or not changes(pending.ticket, outcome):
            return Ran(pending.position)
        computed = outcome.body if outcome.computed is None else outcome.computed
        digest = hashlib.sha256(computed).digest()
        took_s = 0.0 if pending.started_at is None else time.time() - pending.started_at
        return Ran(pending.position, applied=True, digest=digest, took_s=took_s)
