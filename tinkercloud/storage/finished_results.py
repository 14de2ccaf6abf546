"""Results that clients got, read again to show them. They are kept as long as their futures are."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field

from tinkercloud.storage.database import Database
from tinkercloud.storage.futures import SAMPLING_KIND, Sampled


@dataclass(frozen=True, slots=True)
class LaneResult:
    """An operation of a model that has ended or not. body: its result; b"" where it has none, or
    is of another kind than was asked for. finished_at: None while it is pending."""

    seq_id: int
    kind: str
    status: str
    finished_at: float | None
    body: bytes = field(repr=False)


class FinishedResults:
    """Reads take the user and show nothing of anybody else's."""

    def __init__(self, database: Database):
        self._database = database

    async def of_model(
        self, user: str, model_id: str, kinds: Collection[str], after: int, limit: int
    ) -> list[LaneResult]:
        """Operations with a higher number than `after`, in their order; bodies of these kinds."""
        rows = await self._database.all(
            "SELECT seq_id, kind, status, finished_at, CASE WHEN status = 'completed' AND kind IN"
            " (SELECT value FROM json_each(?)) THEN body ELSE x'' END FROM futures"
            " WHERE model_id = ? AND user = ? AND seq_id > ? ORDER BY seq_id LIMIT ?",
            *(json.dumps(sorted(kinds)), model_id, user, after, limit),
        )
        return [LaneResult(*row) for row in rows]

    async def newest_samples(self, user: str, limit: int) -> list[tuple[str, Sampled]]:
        """(request id, sample) of those that succeeded."""
        rows = await self._database.all(
            "SELECT request_id, user, sampler_id, request, body, started_at, finished_at"
            " FROM futures WHERE finished_at IS NOT NULL AND kind = ? AND user = ?"
            " AND status = 'completed' AND request IS NOT NULL"
            " ORDER BY finished_at DESC LIMIT ?",
            *(SAMPLING_KIND, user, limit),
        )
        return [(row[0], Sampled(*row[1:])) for row in rows]
