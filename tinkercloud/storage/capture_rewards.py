"""Rewards of capture sessions, which episodes are closed, and questions to webhooks underway."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from tinkercloud.storage.database import Database


@dataclass(frozen=True, slots=True)
class Delivery:
    """next_at None: answered, or given up with `error`."""

    trajectory_id: str
    attempts: int
    next_at: float | None
    error: str | None


_OF_A_SESSION = " WHERE EXISTS (SELECT 1 FROM captures WHERE capture_id = ?1)"


class CaptureRewardStorage:
    """Takes ids of sessions whose owner the caller has checked. Nothing is kept of one that was
    deleted since."""

    def __init__(self, database: Database):
        self._database = database

    async def put(self, capture_id: str, target: str, key: str, value: float) -> None:
        """The same target and key again: replaced."""
        await self._database.write(
            f"INSERT INTO capture_rewards SELECT ?1, ?2, ?3, ?4, ?5{_OF_A_SESSION}"
            " ON CONFLICT DO UPDATE SET value = excluded.value, created_at = excluded.created_at",
            *(capture_id, target, key, value, time.time()),
        )

    async def number(self, capture_id: str) -> int:
        row = await self._database.one(
            "SELECT COUNT(*) AS number FROM capture_rewards WHERE capture_id = ?", capture_id
        )
        return 0 if row is None else row["number"]

    async def by_target(self, capture_id: str) -> dict[str, float]:
        """Rewards of different keys are added."""
        rows = await self._database.all(
            "SELECT target, SUM(value) AS total FROM capture_rewards WHERE capture_id = ?"
            " GROUP BY target",
            capture_id,
        )
        return {row["target"]: row["total"] for row in rows}

    async def close(self, capture_id: str, episode: str) -> None:
        await self._database.write(
            f"INSERT OR IGNORE INTO capture_closings SELECT ?1, ?2, ?3{_OF_A_SESSION}",
            *(capture_id, episode, time.time()),
        )

    async def closed(self, capture_id: str) -> frozenset[str]:
        """Keys of episodes."""
        rows = await self._database.all(
            "SELECT episode FROM capture_closings WHERE capture_id = ?", capture_id
        )
        return frozenset(row["episode"] for row in rows)

    async def put_delivery(self, capture_id: str, delivery: Delivery) -> None:
        await self._database.write(
            f"INSERT OR REPLACE INTO capture_deliveries SELECT ?1, ?2, ?3, ?4, ?5{_OF_A_SESSION}",
            *(capture_id, delivery.trajectory_id, delivery.attempts, delivery.next_at),
            delivery.error,
        )

    async def deliveries(self, capture_id: str) -> Mapping[str, Delivery]:
        """By trajectory."""
        rows = await self._database.all(
            "SELECT trajectory_id, attempts, next_at, error FROM capture_deliveries"
            " WHERE capture_id = ?",
            capture_id,
        )
        return {row["trajectory_id"]: Delivery(*row) for row in rows}

    async def with_webhook(self) -> list[tuple[str, str]]:
        """(user, capture id) of the sessions that ask a webhook; maintenance only."""
        rows = await self._database.all(
            "SELECT user, capture_id FROM captures"
            " WHERE json_extract(details, '$.webhook') IS NOT NULL AND num_turns > 0"
        )
        return [(row["user"], row["capture_id"]) for row in rows]
