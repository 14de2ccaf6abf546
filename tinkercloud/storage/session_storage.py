"""Sessions: who began them, their last heartbeat, how they ended."""

import json
import time
from dataclasses import dataclass, field

from tinkercloud.storage.database import Database, Row


@dataclass(frozen=True, slots=True)
class Session:
    session_id: str
    user: str
    created_at: float
    heartbeat_at: float
    finished_at: float | None = None
    details: dict[str, object] = field(default_factory=dict)


def _session(row: Row) -> Session:
    return Session(
        row["session_id"],
        row["user"],
        row["created_at"],
        row["heartbeat_at"],
        row["finished_at"],
        json.loads(row["details"]),
    )


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
            "UPDATE sessions SET heartbeat_at = ? WHERE session_id = ?", time.time(), session_id
        )

    async def finish(self, session_id: str, reason: str) -> None:
        """The first reason stays."""
        await self._database.write(
            "UPDATE sessions SET finished_at = ?, finish_reason = ?"
            " WHERE session_id = ? AND finished_at IS NULL",
            *(time.time(), reason, session_id),
        )
