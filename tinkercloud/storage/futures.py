"""Requests and their outcomes. A row is written before work begins and again when it ends."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tinkercloud.errors import Category
from tinkercloud.storage import journal
from tinkercloud.storage.database import Database, Row, Statement
from tinkercloud.storage.journal import LanePast, Ran

JSON_TYPE = "application/json"
PROTOBUF_TYPE = "application/x-protobuf"
Status = Literal["completed", "failed"]
SAMPLING_KIND = "Sample"
"""Of requests that are kept as long as their results: receipts are made of both."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a request is, apart from its work.

    kind: the client's name of it ("ForwardBackward", ...). dedup_key: two requests with the same
    key are one request, and must have the same digest of what they ask for, where both have one.
    model_id and seq_id: its place in a lane, where it has one; a sample has
    sampler_id and seq_id instead. num_tokens: the most that it may use.
    """

    user: str
    kind: str
    dedup_key: str | None = None
    model_id: str | None = None
    seq_id: int | None = None
    sampler_id: str | None = None
    digest: bytes | None = field(default=None, repr=False)
    num_tokens: int = 0

    @property
    def creates_model(self) -> bool:
        """Number 0 of the lane; an operation that is not numbered by its client has no key."""
        return self.model_id is not None and self.seq_id == 0 and self.dedup_key is not None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished request: the bytes to answer with, as they are. computed: what of them the same
    operation on the same state gives again, where that is not all of the body."""

    status: Status
    content_type: str
    body: bytes
    computed: bytes | None = field(default=None, repr=False, compare=False)


def completed_json(value: dict[str, object]) -> Outcome:
    """A JSON result. Values that JSON does not have (NaN, Infinity) are our defect."""
    assert "error" not in value, "clients read it as failure (wire specification, section 0)"
    return Outcome("completed", JSON_TYPE, json.dumps(value, allow_nan=False).encode())


def completed_protobuf(body: bytes) -> Outcome:
    return Outcome("completed", PROTOBUF_TYPE, body)


def failed(text: str, category: Category) -> Outcome:
    body = json.dumps({"error": text, "category": category}).encode()
    return Outcome("failed", JSON_TYPE, body)


@dataclass(frozen=True, slots=True)
class Operation:
    """A request by its times, in seconds since the epoch. owner: its model or sampling session.
    started_at None: it has not begun, or ended before it did; finished_at None: it is pending."""

    request_id: str
    owner: str
    kind: str
    seq_id: int | None
    status: str
    num_bytes: int
    created_at: float
    started_at: float | None
    finished_at: float | None


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sample that succeeded: what was asked for (JSON), and the result as its client got it."""

    user: str
    sampler_id: str
    request: bytes = field(repr=False)
    body: bytes = field(repr=False)
    started_at: float
    finished_at: float


@dataclass(frozen=True, slots=True)
class Kept:
    """An acknowledged request that has no outcome yet, as it is on record. in_lane: whether it is
    an operation of a lane."""

    request_id: str
    ticket: Ticket
    request: bytes = field(repr=False)
    in_lane: bool = False


RESTARTED = failed(
    "the server restarted before this operation finished and its effect is lost; go on with "
    "training from your last checkpoint",
    "server",
)


_FAIL_MODEL = (
    "UPDATE models SET state = 'failed' WHERE state = 'live' AND model_id IN (SELECT model_id"
    " FROM futures WHERE seq_id = 0 AND dedup_key IS NOT NULL AND {})"
)
"""Of requests that `Ticket.creates_model` is true of."""
_LOST = (
    "status = 'pending' AND request IS NULL AND NOT EXISTS"
    " (SELECT 1 FROM operations WHERE operations.request_id = futures.request_id)"
)


class FuturesStorage:
    """All times are taken here, so that expiry has one clock. A finished result stays until it
    expires: a poll whose answer was lost comes again (wire specification, section 4.4)."""

    def __init__(self, database: Database):
        self._database = database

    async def add(
        self, request_id: str, ticket: Ticket, request: bytes | None = None, *, in_lane: bool
    ) -> None:
        """Acknowledge: the request outlives the process when this returns. request: kept until the
        outcome is there; of an operation of a lane, until a snapshot has its effect."""
        future = _new_row(request_id, ticket, None if in_lane else request)
        if request is None or not in_lane:
            await self._database.write_all(future)
            return
        assert ticket.model_id is not None
        assert ticket.seq_id is not None
        place = (ticket.user, ticket.model_id, ticket.kind, ticket.seq_id)
        await self._database.write_all(future, journal.begin(request_id, place, request))

    async def add_ended(self, request_id: str, ticket: Ticket, outcome: Outcome) -> None:
        """Acknowledge what has an outcome without work."""
        await self._database.write_all(
            _new_row(request_id, ticket, None), _end(request_id, outcome, None)
        )

    async def finish(
        self,
        request_id: str,
        outcome: Outcome,
        started_at: float | None = None,
        ran: Ran | None = None,
    ) -> None:
        """started_at: when its work began; None: it never did. ran: of an operation in a
        journal. A model whose creation failed is failed from then on."""
        statements = [_end(request_id, outcome, started_at)]
        if ran is not None:
            statements.append(journal.end(request_id, ran))
        if outcome.status == "failed":
            statements.append((_FAIL_MODEL.format("request_id = ?"), (request_id,)))
        await self._database.write_all(*statements)

    async def outcome(self, request_id: str, user: str) -> Outcome | None:
        """None: unknown, somebody else's, expired, or not finished."""
        row = await self._database.one(
            "SELECT status, content_type, body FROM futures"
            " WHERE request_id = ? AND user = ? AND status != 'pending'",
            *(request_id, user),
        )
        return None if row is None else Outcome(row["status"], row["content_type"], row["body"])

    async def sample(self, sampler_id: str, seq_id: int) -> Sampled | None:
        """None: there was none, it failed, or is not kept any more."""
        row = await self._database.one(
            "SELECT user, sampler_id, request, body, started_at, finished_at FROM futures"
            " WHERE sampler_id = ? AND seq_id = ? AND kind = ? AND status = 'completed'"
            " AND request IS NOT NULL",
            *(sampler_id, seq_id, SAMPLING_KIND),
        )
        return None if row is None else Sampled(*row)

    async def finished_samples(self, user: str, sampler_id: str, after: float) -> list[Row]:
        """(request_id, seq_id, status, num_bytes) of samples that finished later than `after`."""
        return await self._database.all(
            "SELECT request_id, status, LENGTH(body) AS num_bytes, seq_id FROM futures"
            " WHERE sampler_id = ? AND user = ? AND status != 'pending' AND finished_at > ?"
            " ORDER BY finished_at",
            *(sampler_id, user, after),
        )

    async def of_session(self, user: str, session_id: str) -> list[Operation]:
        """All that is still on record, oldest first."""
        # Ids of models and samplers begin with their session's; ";" is the character after ":".
        first, last = f"{session_id}:", f"{session_id};"
        columns = (
            "request_id, COALESCE(model_id, sampler_id), kind, seq_id, status,"
            " COALESCE(LENGTH(body), 0), created_at, started_at, finished_at"
        )
        rows = await self._database.all(
            f"SELECT {columns} FROM futures WHERE model_id >= ? AND model_id < ? AND user = ?"
            f" UNION ALL SELECT {columns} FROM futures"
            " WHERE sampler_id >= ? AND sampler_id < ? AND user = ? ORDER BY created_at",
            *(first, last, user, first, last, user),
        )
        return [Operation(*row) for row in rows]

    async def on_record(self, request_id: str) -> str:
        """What the database has of a request that it has no outcome of, in words for a log."""
        row = await self._database.one(
            "SELECT user, status FROM futures WHERE request_id = ?", request_id
        )
        return "not on record" if row is None else f"{row['status']} for user {row['user']}"

    async def find(self, dedup_key: str) -> tuple[str, bytes | None] | None:
        """The request id that already has this key, and the digest of what it asks for."""
        row = await self._database.one(
            "SELECT request_id, digest FROM futures WHERE dedup_key = ?", dedup_key
        )
        return None if row is None else (row["request_id"], row["digest"])

    async def lane_past(self, user: str, model_id: str, chunks: frozenset[str]) -> LanePast:
        """Where the lane of a model stands, by what is on record. chunks: those kinds."""
        row = await self._database.one(
            "SELECT COALESCE(MAX(seq_id), -1) AS acknowledged,"
            " COALESCE(MAX(seq_id) FILTER (WHERE status != 'pending'), -1) AS ended,"
            " COALESCE(MAX(seq_id) FILTER (WHERE status != 'pending'"
            " AND kind NOT IN (SELECT value FROM json_each(?))), -1) AS ordered"
            " FROM futures WHERE model_id = ? AND user = ?",
            *(json.dumps(sorted(chunks)), model_id, user),
        )
        position = await self._database.one(
            "SELECT MAX(position) AS last FROM ("
            " SELECT position FROM operations WHERE model_id = ?1 AND user = ?2 UNION ALL"
            " SELECT position FROM snapshots WHERE model_id = ?1 AND user = ?2)",
            *(model_id, user),
        )
        assert row is not None
        assert position is not None
        return LanePast(
            row["ended"] + 1, row["ordered"], row["acknowledged"] + 1, position["last"] or 0
        )

    async def pending(self) -> list[Kept]:
        """What has no outcome and can begin again: of lanes in their order, then what is in no
        lane."""
        rows = await self._database.all(
            "SELECT request_id, COALESCE(futures.request, operations.request),"
            " operations.request_id IS NOT NULL, futures.user, futures.kind, dedup_key,"
            " futures.model_id, futures.seq_id, sampler_id, futures.digest"
            " FROM futures LEFT JOIN operations USING (request_id) WHERE status = 'pending'"
            " AND COALESCE(futures.request, operations.request) IS NOT NULL"
            # Not by the clock, which may have been set back: a number that comes after a later one
            # is refused as too late.
            " ORDER BY operations.request_id IS NULL, futures.seq_id, futures.created_at"
        )
        return [Kept(row[0], Ticket(*row[3:]), row[1], bool(row[2])) for row in rows]

    async def fail_pending(self, outcome: Outcome) -> None:
        """At start, of what cannot begin again: it was in the memory of a process that is gone."""
        await self._database.write_all(
            (_FAIL_MODEL.format(_LOST), ()),
            (
                "UPDATE futures SET status = ?, content_type = ?, body = ?, finished_at = ?"
                f" WHERE {_LOST}",
                (outcome.status, outcome.content_type, outcome.body, time.time()),
            ),
        )

    async def expire(self, ttl_s: float) -> None:
        """Delete results that were finished more than ttl_s ago."""
        await self._database.write("DELETE FROM futures WHERE finished_at < ?", time.time() - ttl_s)

    async def keep_within(self, max_bytes: int, spared_s: float) -> int:
        """Delete the oldest results where all have more bytes than that, but none that is younger
        than spared_s: its client may not have it yet. How many."""
        if await self._database.num_bytes() <= max_bytes:
            return 0
        rows = await self._database.all(
            # materialized: else the sum would sort the results themselves
            "WITH sizes AS MATERIALIZED (SELECT request_id, finished_at,"
            " COALESCE(LENGTH(body), 0) + COALESCE(LENGTH(request), 0) AS num_bytes"
            " FROM futures WHERE finished_at IS NOT NULL)"
            " SELECT request_id FROM (SELECT request_id, finished_at,"
            " SUM(num_bytes) OVER (ORDER BY finished_at DESC, request_id) AS total FROM sizes)"
            " WHERE total > ? AND finished_at < ?",
            *(max_bytes, time.time() - spared_s),
        )
        names = json.dumps([row["request_id"] for row in rows])
        if rows:
            await self._database.write(
                "DELETE FROM futures WHERE request_id IN (SELECT value FROM json_each(?))", names
            )
        return len(rows)

    async def delete_finished(
        self, user: str, request_ids: Sequence[str] | None, model_id: str | None
    ) -> int:
        """Delete results of the user: those named, or all of a model's, or all. How many."""
        names = None if request_ids is None else json.dumps(list(request_ids))
        where = (
            "user = ? AND status != 'pending' AND (? IS NULL OR model_id = ?)"
            " AND (? IS NULL OR request_id IN (SELECT value FROM json_each(?)))"
        )
        values = (user, model_id, model_id, names, names)
        rows = await self._database.all(f"SELECT request_id FROM futures WHERE {where}", *values)
        await self._database.write(f"DELETE FROM futures WHERE {where}", *values)
        return len(rows)


def _new_row(request_id: str, ticket: Ticket, request: bytes | None) -> Statement:
    return (
        "INSERT INTO futures (request_id, user, kind, dedup_key, model_id, seq_id, sampler_id,"
        " digest, status, created_at, request)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'pending', ?, ?)",
        (
            *(request_id, ticket.user, ticket.kind, ticket.dedup_key, ticket.model_id),
            *(ticket.seq_id, ticket.sampler_id, ticket.digest, time.time(), request),
        ),
    )


def _end(request_id: str, outcome: Outcome, started_at: float | None) -> Statement:
    return (
        "UPDATE futures SET status = ?, content_type = ?, body = ?, started_at = ?,"
        " finished_at = ?, request = CASE WHEN kind = ? AND ? = 'completed' THEN request END"
        " WHERE request_id = ?",
        (
            *(outcome.status, outcome.content_type, outcome.body),
            *(started_at, time.time(), SAMPLING_KIND, outcome.status, request_id),
        ),
    )
