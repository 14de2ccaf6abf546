"""What training scripts report of their runs: rewards above all, which the server cannot know."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinkercloud.storage.database import Database

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ReportedPoint:
    """step: as the script counts. number: changes of a run's points are counted, the newest has the
    highest."""

    step: int
    number: int
    metrics: Metrics


class ReportedMetricsStorage:
    """Reads take the user and show nothing of anybody else's."""

    def __init__(self, database: Database):
        self._database = database

    async def add(
        self, user: str, model_id: str, points: Sequence[tuple[int, Metrics]], *, keep: int
    ) -> None:
        """What is reported of a step again is added to it, and replaces what has the same name.
        keep: so many of the run's points, those of the highest steps."""
        rows = json.dumps([[step, dict(metrics)] for step, metrics in points], allow_nan=False)
        await self._database.write_all(
            (
                "INSERT INTO reported_metrics (model_id, step, user, number, metrics, reported_at)"
                " SELECT ?1, value ->> 0, ?2,"
                "  1 + key + (SELECT COALESCE(MAX(number), 0) FROM reported_metrics"
                "   WHERE model_id = ?1), value -> 1, ?3 FROM json_each(?4) WHERE true"
                " ON CONFLICT DO UPDATE SET number = excluded.number,"
                "  metrics = json_patch(metrics, excluded.metrics),"
                "  reported_at = excluded.reported_at",
                (model_id, user, time.time(), rows),
            ),
            (
                "DELETE FROM reported_metrics WHERE model_id = ?1 AND step <= (SELECT step"
                " FROM reported_metrics WHERE model_id = ?1 ORDER BY step DESC LIMIT 1 OFFSET ?2)",
                (model_id, keep),
            ),
        )

    async def points(self, user: str, model_id: str, after: int, limit: int) -> list[ReportedPoint]:
        """Those with a higher number than `after`, in its order."""
        rows = await self._database.all(
            "SELECT step, number, metrics FROM reported_metrics WHERE model_id = ? AND user = ?"
            " AND number > ? ORDER BY number LIMIT ?",
            *(model_id, user, after, limit),
        )
        return [ReportedPoint(step, number, json.loads(text)) for step, number, text in rows]

    async def num_characters(self, user: str) -> int:
        """Of all that the user has reported."""
        row = await self._database.one(
            "SELECT COALESCE(SUM(LENGTH(metrics)), 0) FROM reported_metrics WHERE user = ?", user
        )
        assert row is not None
        return row[0]

    async def expire(self, ttl_s: float) -> None:
        await self._database.write(
            "DELETE FROM reported_metrics WHERE reported_at < ?", time.time() - ttl_s
        )
