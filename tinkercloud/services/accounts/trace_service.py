"""The timeline of a session: its operations and samples, for a viewer of traces.

The format is Chrome's trace events as JSON, which ui.perfetto.dev opens. A process for each model
and each sampling session; in it rows of waiting and rows of running operations, as many of each as
there were at once.
"""

import asyncio
import heapq
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal
from urllib.parse import quote, urlencode

from tinkercloud.services.accounts.session_service import SessionService
from tinkercloud.services.accounts.signed_links import LIFETIME_S, PREFIX, SignedLink, check, sign
from tinkercloud.storage.futures import FuturesStorage, Operation

Phase = Literal["waiting", "running"]
_FIRST_ROW: dict[Phase, int] = {"waiting": 1, "running": 100_001}


class TraceService:
    """secret: what links are signed with. A trace is made when its link is read."""

    def __init__(self, sessions: SessionService, futures: FuturesStorage, secret: bytes):
        self._sessions = sessions
        self._futures = futures
        self._secret = secret

    async def url_path(self, user: str, session_id: str) -> str:
        """A link to the trace of a session, good for an hour. Raises SessionNotFound."""
        await self._sessions.get(user, session_id)
        link = sign(_link(session_id, user), self._secret, int(time.time()) + LIFETIME_S)
        query = {"reader": user, "expires": link.expires, "signature": link.signature}
        return f"{PREFIX}traces/{quote(session_id)}?{urlencode(query)}"

    async def open(self, session_id: str, reader: str, expires: str, signature: str) -> bytes:
        """Raises LinkRefused, SessionNotFound."""
        check(_link(session_id, reader, expires, signature), self._secret)
        await self._sessions.get(reader, session_id)
        operations = await self._futures.of_session(reader, session_id)
        return await asyncio.to_thread(_trace, operations)


def _link(session_id: str, reader: str, expires: str = "", signature: str = "") -> SignedLink:
    # No checkpoint has such a link: its segment is none of theirs.
    return SignedLink(session_id, "traces", "", "", "trace.json", reader, expires, signature)


def _trace(operations: Sequence[Operation]) -> bytes:
    by_owner: defaultdict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        by_owner[operation.owner].append(operation)
    events: list[dict[str, Any]] = []
    for process, (owner, owned) in enumerate(by_owner.items(), start=1):
        events.append(_name("process_name", owner, process, 0))
        for phase in ("waiting", "running"):
            events += _slices(owned, phase, process)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode()


def _slices(
    operations: Sequence[Operation], phase: Phase, process: int
) -> Iterator[dict[str, Any]]:
    """A row is taken again once its slice has ended, so that no two overlap."""
    busy: list[tuple[float, int]] = []  # (end, row)
    free: list[int] = []
    num_rows = 0
    spans = ((*_span(operation, phase), operation) for operation in operations)
    for begin, end, operation in sorted(spans, key=lambda span: span[0]):
        if end <= begin:
            continue
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row = _FIRST_ROW[phase] + num_rows
            num_rows += 1
            yield _name("thread_name", phase, process, row)
        heapq.heappush(busy, (end, row))
        yield {
            "name": operation.kind,
            "cat": phase,
            "ph": "X",
            "ts": begin * 1e6,
            "dur": (end - begin) * 1e6,
            "pid": process,
            "tid": row,
            "args": {
                "request_id": operation.request_id,
                "seq_id": operation.seq_id,
                "status": operation.status,
                "result_bytes": operation.num_bytes,
            },
        }


def _span(operation: Operation, phase: Phase) -> tuple[float, float]:
    """Seconds since the epoch. What still waits or runs does so until now."""
    finished_at = time.time() if operation.finished_at is None else operation.finished_at
    started_at = finished_at if operation.started_at is None else operation.started_at
    if phase == "waiting":
        return operation.created_at, started_at
    return started_at, finished_at


def _name(kind: str, name: str, process: int, row: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
