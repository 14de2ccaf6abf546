"""Runs that can be replayed: the journal's rows of what no model needs after a crash any more."""

from dataclasses import dataclass

from tinkercloud.storage.database import Database
from tinkercloud.storage.journal import RAN_COLUMNS, STEP_KIND, RanOperation


@dataclass(frozen=True, slots=True)
class Run:
    """What is kept of a model's operations. first, last: positions of the first and the last one
    that is kept. num_bytes: of their requests, and of snapshots. oldest_at: when the first one ran,
    in seconds since the epoch. ended_at None: the model is there, and what its last snapshot
    does not have is not the archive's to remove."""

    model_id: str
    user: str
    first: int
    last: int
    num_operations: int
    num_steps: int
    num_bytes: int
    oldest_at: float
    ended_at: float | None
    inexact_since: int | None


_RUNS = f"""
SELECT model_id, user, MIN(position), MAX(position), COUNT(*), SUM(kind = '{STEP_KIND}'),
    SUM(LENGTH(request)) + (SELECT COALESCE(SUM(num_bytes), 0) FROM snapshots
        WHERE snapshots.model_id = operations.model_id),
    MIN(ran_at), runs.ended_at, runs.inexact_since
FROM operations LEFT JOIN runs USING (model_id, user) WHERE applied
"""


class ArchiveStorage:
    def __init__(self, database: Database):
        self._database = database

    async def runs(self) -> list[Run]:
        """Those with the oldest operations first."""
        rows = await self._database.all(f"{_RUNS} GROUP BY model_id, user ORDER BY MIN(ran_at)")
        return [Run(*row) for row in rows]

    async def run(self, model_id: str) -> Run | None:
        row = await self._database.one(
            f"{_RUNS} AND model_id = ? GROUP BY model_id, user", model_id
        )
        return None if row is None else Run(*row)

    async def operation(self, request_id: str) -> RanOperation | None:
        row = await self._database.one(
            f"SELECT {RAN_COLUMNS} FROM operations WHERE request_id = ? AND applied", request_id
        )
        return None if row is None else RanOperation(*row)

    async def position_of_step(self, model_id: str, number: int, before: int) -> int | None:
        """Where the number-th step is among the operations that are kept after the position
        `before`; None: there are fewer."""
        row = await self._database.one(
            "SELECT position FROM operations WHERE model_id = ? AND applied AND kind = ?"
            " AND position > ? ORDER BY position LIMIT 1 OFFSET ?",
            *(model_id, STEP_KIND, before, number - 1),
        )
        return None if row is None else row["position"]

    async def numerics(self, model_id: str) -> list[tuple[int, str]]:
        """(position, class that computed what ran after it), in order."""
        rows = await self._database.all(
            "SELECT position, class FROM numerics WHERE model_id = ? ORDER BY position", model_id
        )
        return [(row["position"], row["class"]) for row in rows]

    async def inflight_publications(
        self, model_id: str, began: float, ended: float
    ) -> list[RanOperation]:
        """Operations that published what inflight samplers of the model sampled at any time between
        the two, newest first."""
        rows = await self._database.all(
            f"SELECT {RAN_COLUMNS}, ran_at FROM operations WHERE model_id = ?1 AND applied"
            " AND ran_at <= ?2 AND request_id IN (SELECT request_id FROM samplers"
            " WHERE model_id = ?1 AND kind = 'inflight') ORDER BY position DESC",
            *(model_id, ended),
        )
        num_later = sum(row["ran_at"] > began for row in rows)
        return [RanOperation(*row[:-1]) for row in rows[: num_later + 1]]

    async def next_cut(self, model_id: str) -> int | None:
        """The position of the oldest snapshot that has something kept before it; None: nothing can
        be cut."""
        row = await self._database.one(
            "SELECT MIN(position) FROM snapshots s WHERE model_id = ?1 AND ("
            " EXISTS (SELECT 1 FROM operations o WHERE o.model_id = ?1"
            "  AND o.position <= s.position)"
            " OR EXISTS (SELECT 1 FROM snapshots t WHERE t.model_id = ?1"
            "  AND t.position < s.position))",
            model_id,
        )
        return None if row is None else row[0]

    async def newest_in(self, model_id: str, position: int) -> float | None:
        """When the last operation up to a position ran; None: there is none."""
        row = await self._database.one(
            "SELECT MAX(ran_at) FROM operations WHERE model_id = ? AND position <= ?",
            *(model_id, position),
        )
        return None if row is None else row[0]

    async def cut(self, user: str, model_id: str, position: int) -> None:
        """The run begins with its snapshot at this position from now on."""
        of_model = (model_id, user, position)
        await self._database.write_all(
            ("DELETE FROM snapshots WHERE model_id = ? AND user = ? AND position < ?", of_model),
            ("DELETE FROM operations WHERE model_id = ? AND user = ? AND position <= ?", of_model),
        )
