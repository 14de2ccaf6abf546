"""Sessions: who began them, their last heartbeat, how they ended."""

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tinkercloud.storage.database import Database, Row

DEFAULT_PROJECT = "default"  # of sessions that name none


@dataclass(frozen=True, slots=True)
class Session:
    session_id: str
    user: str
    created_at: float
    heartbeat_at: float
    finished_at: float | None = None
    details: dict[str, object] = field(default_factory=dict)
    finish_reason: str | None = None

    @property
    def expired_at(self) -> float | None:
        """When it was closed for want of heartbeats; None: it was not, or has been resumed."""
        at = self.details.get("expired_at")
        return at if isinstance(at, float) else None

    @property
    def project_id(self) -> str:
        return str(self.details.get("project_id") or DEFAULT_PROJECT)


class PagePlace(NamedTuple):
    """A session's place in the list: created_us in microseconds since the epoch, since that is what
    a client's timestamps carry."""

    created_us: int
    session_id: str


@dataclass(frozen=True, slots=True)
class Stored:
    """Checkpoints of a session."""

    num_checkpoints: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LastResult:
    request_id: str
    kind: str
    body: bytes | None  # where it failed


def _session(row: Row) -> Session:
    return Session(
        row["session_id"],
        row["user"],
        row["created_at"],
        row["heartbeat_at"],
        row["finished_at"],
        json.loads(row["details"]),
        row["finish_reason"],
    )


# Without a heartbeat, a request or a result since ?1, and with no request pending. Ids of models
# and samplers begin with their session's; ";" is the character after ":".
_SILENT = (
    "SELECT user, session_id FROM sessions s WHERE heartbeat_at < ?1"
    " AND NOT EXISTS (SELECT 1 FROM models m WHERE m.session_id = s.session_id"
    "  AND m.last_request_at >= ?1)"
    " AND NOT EXISTS (SELECT 1 FROM futures f WHERE f.model_id >= s.session_id || ':'"
    "  AND f.model_id < s.session_id || ';' AND (f.status = 'pending' OR f.finished_at >= ?1))"
    " AND NOT EXISTS (SELECT 1 FROM futures f WHERE f.sampler_id >= s.session_id || ':'"
    "  AND f.sampler_id < s.session_id || ';' AND (f.status = 'pending' OR f.finished_at >= ?1))"
)
_CREATED_US = "CAST(ROUND(created_at * 1e6) AS INTEGER)"


class SessionStorage:
    def __init__(self, database: Database):
        self._database = database

    async def add(self, session_id: str, user: str, details: dict[str, object]) -> None:
        now = time.time()
        await self._database.write(
            "INSERT INTO sessions (session_id, user, created_at, heartbeat_at, details)"
            " VALUES (?, ?, ?, ?, ?)",
            *(session_id, user, now, now, json.dumps(details)),
        )

    async def get(self, session_id: str, user: str) -> Session | None:
        row = await self._database.one(
            "SELECT * FROM sessions WHERE session_id = ? AND user = ?", session_id, user
        )
        return None if row is None else _session(row)

    async def list(self, user: str, limit: int, offset: int) -> list[Session]:
        """Newest first."""
        rows = await self._database.all(
            "SELECT * FROM sessions WHERE user = ? ORDER BY created_at DESC, session_id"
            " LIMIT ? OFFSET ?",
            *(user, limit, offset),
        )
        return [_session(row) for row in rows]

    async def heartbeat(self, session_id: str) -> None:
        await self._database.write(
            "UPDATE sessions SET heartbeat_at = ?, details = CASE WHEN details LIKE '%expired_at%'"
            " THEN json_remove(details, '$.expired_at') ELSE details END WHERE session_id = ?",
            *(time.time(), session_id),
        )

    async def silent_since(self, before: float) -> Sequence[tuple[str, str]]:
        """(user, session) of open ones that have been silent since then: for maintenance."""
        rows = await self._database.all(
            f"{_SILENT} AND finished_at IS NULL AND json_valid(details)"  # NaN was accepted once
            " AND CASE WHEN details LIKE '%expired_at%'"
            "  THEN json_extract(details, '$.expired_at') IS NULL ELSE TRUE END",
            before,
        )
        return [(row["user"], row["session_id"]) for row in rows]

    async def unused_since(self, before: float) -> Sequence[tuple[str, str]]:
        """(user, session) of those that have models, were not finished to the end, and have been
        silent since then."""
        rows = await self._database.all(
            f"{_SILENT} AND EXISTS (SELECT 1 FROM models m WHERE m.session_id = s.session_id"
            "  AND (m.state = 'live' OR s.finished_at IS NULL))",
            before,
        )
        return [(row["user"], row["session_id"]) for row in rows]

    async def expire(self, session_id: str) -> None:
        """Until its next heartbeat."""
        await self._database.write(
            "UPDATE sessions SET details = json_set(details, '$.expired_at', ?)"
            " WHERE session_id = ? AND finished_at IS NULL",
            *(time.time(), session_id),
        )

    async def finish(self, session_id: str, reason: str, detail: str | None = None) -> None:
        """The first reason stays."""
        await self._database.write(
            "UPDATE sessions SET finished_at = ?, finish_reason = ?,"
            " details = json_set(details, '$.finish_detail', ?)"
            " WHERE session_id = ? AND finished_at IS NULL",
            *(time.time(), reason, detail, session_id),
        )

    async def set_project(self, session_id: str, user: str, project_id: str) -> None:
        await self._database.write(
            "UPDATE sessions SET details = json_set(details, '$.project_id', ?)"
            " WHERE session_id = ? AND user = ?",
            *(project_id, session_id, user),
        )

    async def page(
        self, users: Collection[str] | None, after: PagePlace | None, limit: int
    ) -> Sequence[tuple[PagePlace, Session]]:
        """Newest first, from the session after that place on. users None: everybody's."""
        place = PagePlace(2**62, "") if after is None else after
        owned = "user IN (SELECT value FROM json_each(?))" if users is not None else "? IS NULL"
        names = None if users is None else json.dumps(list(users))
        rows = await self._database.all(
            f"SELECT *, {_CREATED_US} AS created_us FROM sessions WHERE {owned}"
            f" AND ({_CREATED_US} < ? OR ({_CREATED_US} = ? AND session_id > ?))"
            " ORDER BY created_us DESC, session_id LIMIT ?",
            *(names, place.created_us, place.created_us, place.session_id, limit),
        )
        return [(PagePlace(row["created_us"], row["session_id"]), _session(row)) for row in rows]

    async def stored(self, session_ids: Sequence[str]) -> dict[str, Stored]:
        """The checkpoints of those sessions that have any: of whoever may see these."""
        rows = await self._database.all(
            "SELECT session_id, COUNT(*) AS num, SUM(size_bytes) AS num_bytes"
            " FROM checkpoints JOIN models USING (model_id)"
            " WHERE session_id IN (SELECT value FROM json_each(?))"
            " AND (expires_at IS NULL OR expires_at > ?) GROUP BY session_id",
            *(json.dumps(list(session_ids)), time.time()),
        )
        return {row["session_id"]: Stored(row["num"], row["num_bytes"]) for row in rows}

    async def last_result(self, user: str, session_id: str) -> LastResult | None:
        """Of the session's operations and samples, the one that finished last."""
        # Ids of models and samplers begin with their session's; ";" is the character after ":".
        first, last = f"{session_id}:", f"{session_id};"
        row = await self._database.one(
            "SELECT request_id, kind, status, body FROM ("
            " SELECT * FROM futures WHERE model_id >= ? AND model_id < ?"
            " UNION ALL SELECT * FROM futures WHERE sampler_id >= ? AND sampler_id < ?)"
            " WHERE user = ? AND finished_at IS NOT NULL ORDER BY finished_at DESC LIMIT 1",
            *(first, last, first, last, user),
        )
        if row is None:
            return None
        failed = row["status"] == "failed"
        return LastResult(row["request_id"], row["kind"], row["body"] if failed else None)
