"""The requests that are acknowledged and have no outcome on record, and how one comes among them:
its row is written first, once for each key, and a repeat gets the first one's id."""

import asyncio
import time
import uuid
from collections.abc import Iterator

from tinkercloud.core.pending import Admission, EverybodyAdmitted, Pending
from tinkercloud.errors import NumberTaken, ServerFault
from tinkercloud.storage.futures import SAMPLING_KIND, FuturesStorage, Kept, Outcome, Ticket

_TRAIN_PREFIX, _SAMPLE_PREFIX = "train-", "sample-"


def is_sampling(request_id: str) -> bool:
    """By the request id alone: a poll for a forgotten one is answered 410 for a sample, else 404
    (wire specification, section 4.4)."""
    return request_id.startswith(_SAMPLE_PREFIX)


def _require_same(ticket: Ticket, digest: bytes | None) -> None:
    """digest: of the first request with the ticket's key; None: from before digests were kept."""
    if None not in (ticket.digest, digest) and ticket.digest != digest:
        raise NumberTaken(ticket.kind, ticket.model_id or ticket.sampler_id or "", ticket.seq_id)


class PendingRequests:
    """is_closed: nothing more is accepted."""

    def __init__(self, futures: FuturesStorage):
        self._futures = futures
        self._by_id: dict[str, Pending] = {}
        self._by_key: dict[str, Pending] = {}
        self.admission: Admission = EverybodyAdmitted()
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Pending]:
        """Those of now, whatever comes and goes meanwhile."""
        return iter(list(self._by_id.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def find(self, request_id: str) -> Pending | None:
        return self._by_id.get(request_id)

    def find_of(self, user: str, request_id: str) -> Pending | None:
        """None also where it is another user's."""
        pending = self._by_id.get(request_id)
        return pending if pending is not None and pending.ticket.user == user else None

    def restore(self, kept: Kept) -> Pending:
        """One that an earlier process acknowledged."""
        ticket = kept.ticket
        pending = Pending(kept.request_id, ticket, asyncio.get_running_loop().create_future())
        pending.acknowledged.set_result(kept.request_id)
        pending.subject, pending.request = ticket.model_id, kept.request
        self._by_id[kept.request_id] = pending
        self.admission.enter(ticket)
        if ticket.dedup_key is not None:
            self._by_key[ticket.dedup_key] = pending
        return pending

    async def accept(
        self,
        ticket: Ticket,
        request: bytes | None,
        *,
        in_lane: bool = False,
        check_database: bool = True,
        outcome: Outcome | None = None,
    ) -> tuple[Pending, bool]:
        """The request's record, and whether it is new. On record when this returns.

        check_database False: no earlier request can have the key. outcome: where it is known.
        Raises ServerFault, NumberTaken, and what `admission` raises.
        """
        if self.is_closed:
            raise ServerFault("the server is shutting down")
        key = ticket.dedup_key
        original = self._by_key.get(key) if key is not None else None
        if original is not None:
            # shielded: a repeat whose client goes away must not cancel the original's future
            await asyncio.shield(original.acknowledged)
            _require_same(ticket, original.ticket.digest)
            return original, False
        prefix = _SAMPLE_PREFIX if ticket.kind == SAMPLING_KIND else _TRAIN_PREFIX
        loop = asyncio.get_running_loop()
        pending = Pending(prefix + uuid.uuid4().hex, ticket, loop.create_future())
        pending.subject, pending.request = ticket.model_id, request
        if outcome is not None:
            pending.outcome, pending.ended_at = outcome, time.time()
        if key is not None:
            self._by_key[key] = pending  # before the first await, so that a repeat finds it
        try:
            is_new = await self._record(pending, in_lane=in_lane, check_database=check_database)
        except BaseException as error:  # cancelled too: a repeat must not wait for this one
            self.forget(pending)
            if not isinstance(error, Exception):
                pending.acknowledged.cancel()
                raise
            pending.acknowledged.set_exception(error)
            pending.acknowledged.exception()  # retrieved: perhaps no repeat waits for it
            raise
        pending.acknowledged.set_result(pending.request_id)
        if not is_new:
            self.forget(pending)
        return pending, is_new

    async def _record(self, pending: Pending, *, in_lane: bool, check_database: bool) -> bool:
        """Write the row; False where an earlier request has the key (its id is taken over)."""
        key = pending.ticket.dedup_key
        earlier = None
        if check_database and key is not None:
            earlier = await self._futures.find(key)
        if earlier is not None:
            pending.request_id, digest = earlier
            _require_same(pending.ticket, digest)
            return False
        if pending.outcome is not None:
            await self._futures.add_ended(pending.request_id, pending.ticket, pending.outcome)
            return True
        await self._add(pending, in_lane=in_lane)
        if in_lane and pending.request is not None:
            pending.request = b""  # it is on record, and may be large
        self._by_id[pending.request_id] = pending
        return True

    async def _add(self, pending: Pending, *, in_lane: bool) -> None:
        ticket = pending.ticket
        if not ticket.creates_model:  # of these the number of models is limited
            self.admission.require(ticket.user)
        self.admission.enter(ticket)  # no await since: others are being admitted
        try:
            await self._futures.add(pending.request_id, ticket, pending.request, in_lane=in_lane)
        except BaseException:  # cancelled too: its place among the admitted is free again
            self.admission.leave(ticket)
            raise

    def forget(self, pending: Pending) -> None:
        """Its outcome is on record, or it was not accepted."""
        entry = self._by_id.pop(pending.request_id, None)
        if entry is not None:
            self.admission.leave(entry.ticket)
        key = pending.ticket.dedup_key
        if key is not None and self._by_key.get(key) is pending:
            del self._by_key[key]
