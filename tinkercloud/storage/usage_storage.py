"""Usage: tokens by the hour, and for how long checkpoints were stored."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tinkercloud.storage.audit_log import whose
from tinkercloud.storage.database import Database
from tinkercloud.storage.session_storage import DEFAULT_PROJECT

TokenKind = Literal["training", "prefill", "cached_prefill", "sample"]


class UsageKey(NamedTuple):
    """What tokens are counted by. hour: its first second since the epoch."""

    hour: int
    user: str
    session_id: str
    base_model: str
    kind: TokenKind


@dataclass(frozen=True, slots=True)
class StoragePeriod:
    """A checkpoint from began_at to ended_at; None: it is still there."""

    user: str
    session_id: str | None
    base_model: str
    size_bytes: int
    began_at: float
    ended_at: float | None


@dataclass(frozen=True, slots=True)
class StoredInProject:
    user: str
    project_id: str
    num_checkpoints: int
    num_bytes: int


class UsageStorage:
    """Reads take the user and show nothing of anybody else's; user None: everybody's."""

    def __init__(self, database: Database):
        self._database = database

    async def add_tokens(self, counts: Mapping[UsageKey, int]) -> None:
        """All or none of them."""
        rows = json.dumps([[*key, num_tokens] for key, num_tokens in counts.items()])
        await self._database.write(
            "INSERT INTO token_usage (hour, user, session_id, base_model, kind, num_tokens)"
            " SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5"
            " FROM json_each(?) WHERE true"
            " ON CONFLICT DO UPDATE SET num_tokens = num_tokens + excluded.num_tokens",
            rows,
        )

    async def tokens(
        self, user: str | None, first: float, end: float
    ) -> list[tuple[UsageKey, int]]:
        """Of the hours that begin in [first, end), in order."""
        rows = await self._database.all(
            "SELECT hour, user, session_id, base_model, kind, num_tokens FROM token_usage"
            f" WHERE {whose(user)} AND hour >= ? AND hour < ?"
            " ORDER BY hour, user, session_id, base_model, kind",
            *(user, first, end),
        )
        return [(UsageKey(*tuple(row)[:5]), row["num_tokens"]) for row in rows]

    async def storage_periods(
        self, user: str | None, first: float, end: float
    ) -> list[StoragePeriod]:
        """Those that overlap [first, end)."""
        rows = await self._database.all(
            "SELECT storage_periods.user, session_id, storage_periods.base_model, size_bytes,"
            " began_at, ended_at"
            " FROM storage_periods LEFT JOIN models USING (model_id)"
            f" WHERE {whose(user, 'storage_periods.user')} AND began_at < ?"
            " AND (ended_at IS NULL OR ended_at > ?) ORDER BY began_at",
            *(user, end, first),
        )
        return [StoragePeriod(*row) for row in rows]

    async def projects(self, user: str | None, session_ids: Sequence[str]) -> dict[str, str]:
        """The projects that these sessions are in now."""
        rows = await self._database.all(
            "SELECT session_id, json_extract(details, '$.project_id') AS project FROM sessions"
            f" WHERE {whose(user)} AND session_id IN (SELECT value FROM json_each(?))",
            *(user, json.dumps(list(session_ids))),
        )
        return {row["session_id"]: row["project"] or DEFAULT_PROJECT for row in rows}

    async def stored_now(self, user: str | None, project_id: str | None) -> list[StoredInProject]:
        """By user and project; project_id None: all of them."""
        rows = await self._database.all(
            "SELECT storage_periods.user AS owner,"
            " COALESCE(json_extract(sessions.details, '$.project_id'), ?) AS project,"
            " COUNT(*) AS num, SUM(size_bytes) AS num_bytes"
            " FROM storage_periods LEFT JOIN models USING (model_id)"
            " LEFT JOIN sessions ON sessions.session_id = models.session_id"
            f" WHERE {whose(user, 'storage_periods.user')} AND ended_at IS NULL"
            " AND (? IS NULL OR project = ?) GROUP BY owner, project ORDER BY owner, project",
            *(DEFAULT_PROJECT, user, project_id, project_id),
        )
        return [StoredInProject(*row) for row in rows]
