"""What models in training are made of: snapshots of their state, and the operations after them.

An operation's row is written with its acknowledgement. When it has run it gets its position, the
how-manieth of its model's operations it was, in the same commit as its outcome; rows of operations
that changed nothing are deleted then. A snapshot has the position of the last operation in it: what
ran up to there is not done again after a crash. Whether older rows are kept for replays is the
archive's affair (`storage.archive`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinkercloud.storage.database import Database, Statement

STEP_KIND = "OptimStep"
"""The kind of operations that are counted as steps of a run."""


@dataclass(frozen=True, slots=True)
class LanePast:
    """What a model's lane goes on from. next_seq_id: after every number that has an outcome.
    last_ordered: highest number with an outcome that is no chunk; -1: none. first_new_seq_id: after
    every acknowledged number. position: of the last operation that ran; 0: none."""

    next_seq_id: int
    last_ordered: int
    first_new_seq_id: int
    position: int


@dataclass(frozen=True, slots=True)
class Ran:
    """How an operation ended. position None: it did not run. applied: whether its model is another
    by it. digest: of what it computed."""

    position: int | None
    applied: bool = False
    digest: bytes | None = None
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RanOperation:
    """An operation that changed its model, to be done again."""

    request_id: str
    user: str
    model_id: str
    kind: str
    seq_id: int
    position: int
    digest: bytes | None
    took_s: float
    request: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Taken:
    """A model's whole state after its operation at `position`. directory: relative to the data
    folder."""

    model_id: str
    user: str
    position: int
    directory: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Snapshot(Taken):
    """The same on record. num_steps, computed_s: of the operations up to it, steps of the optimizer
    and the seconds they took."""

    num_steps: int
    computed_s: float


@dataclass(frozen=True, slots=True)
class Numerics:
    """The class that computed a model's last operations, and the number of steps after which its
    bits are not those of one class throughout; None: they are."""

    last: str
    inexact_since: int | None


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """Published weights as files. directory: relative to the data folder."""

    key: str
    user: str
    directory: str


RAN_COLUMNS = "request_id, user, model_id, kind, seq_id, position, digest, took_s, request"
_SNAPSHOT = "model_id, user, position, directory, num_bytes, num_steps, computed_s"
_NEWEST = "(SELECT MAX(s.position) FROM snapshots s WHERE s.model_id = operations.model_id)"


class JournalStorage:
    """Rows of operations are begun and ended by `FuturesStorage`, with those of their futures."""

    def __init__(self, database: Database):
        self._database = database

    async def next_after(self, user: str, model_id: str, position: int) -> RanOperation | None:
        """The first operation after a position that changed the model."""
        row = await self._database.one(
            f"SELECT {RAN_COLUMNS} FROM operations WHERE model_id = ? AND user = ? AND position > ?"
            " AND applied ORDER BY position LIMIT 1",
            *(model_id, user, position),
        )
        return None if row is None else RanOperation(*row)

    async def result(self, operation: RanOperation) -> bytes | None:
        """What its client got, if it succeeded; None where that has expired."""
        row = await self._database.one(
            "SELECT body FROM futures WHERE request_id = ? AND status = 'completed'",
            operation.request_id,
        )
        return None if row is None else row["body"]

    async def operations(self, user: str, model_id: str, kind: str) -> list[str]:
        """The request ids of those of a kind that are kept, also if they have not run yet."""
        rows = await self._database.all(
            "SELECT request_id FROM operations WHERE model_id = ? AND user = ? AND kind = ?",
            *(model_id, user, kind),
        )
        return [row["request_id"] for row in rows]

    async def snapshots(self, user: str, model_id: str) -> list[Snapshot]:
        """Oldest first."""
        rows = await self._database.all(
            f"SELECT {_SNAPSHOT} FROM snapshots WHERE model_id = ? AND user = ? ORDER BY position",
            *(model_id, user),
        )
        return [Snapshot(*row) for row in rows]

    async def newest_snapshot(self, user: str, model_id: str) -> Snapshot | None:
        row = await self._database.one(
            f"SELECT {_SNAPSHOT} FROM snapshots WHERE model_id = ? AND user = ?"
            " ORDER BY position DESC LIMIT 1",
            *(model_id, user),
        )
        return None if row is None else Snapshot(*row)

    async def put_snapshot(self, taken: Taken) -> None:
        """It is what the model comes back from, from now on."""
        t = taken
        before = await self.newest_snapshot(t.user, t.model_id)
        position, num_steps, computed_s = (
            (0, 0, 0.0)
            if before is None
            else (before.position, before.num_steps, before.computed_s)
        )
        num_since, seconds = await self._since(t.user, t.model_id, position, t.position)
        await self._database.write(
            "INSERT INTO snapshots (directory, model_id, user, position, num_bytes, created_at,"
            " num_steps, computed_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            *(t.directory, t.model_id, t.user, t.position, t.num_bytes, time.time()),
            *(num_steps + num_since, computed_s + seconds),
        )

    async def _since(self, user: str, model_id: str, after: int, until: int) -> tuple[int, float]:
        """The number of steps, and the seconds of all operations, between two positions."""
        row = await self._database.one(
            "SELECT COALESCE(SUM(kind = ?), 0), COALESCE(SUM(took_s), 0) FROM operations"
            " WHERE model_id = ? AND user = ? AND applied AND position > ? AND position <= ?",
            *(STEP_KIND, model_id, user, after, until),
        )
        assert row is not None
        return row[0], row[1]

    async def drop_snapshots(self, user: str, model_id: str, positions: Sequence[int]) -> None:
        await self._database.write_all(
            *(
                (
                    "DELETE FROM snapshots WHERE model_id = ? AND user = ? AND position = ?",
                    (model_id, user, position),
                )
                for position in positions
            )
        )

    async def debts(self) -> dict[tuple[str, str], float]:
        """Seconds that what ran since its last snapshot took, by (user, model)."""
        rows = await self._database.all(
            "SELECT user, model_id, SUM(took_s) FROM operations WHERE applied AND position >"
            f" COALESCE({_NEWEST}, 0) GROUP BY 1, 2"
        )
        return {(user, model_id): took_s for user, model_id, took_s in rows}

    async def models(self) -> list[tuple[str, str]]:
        """(model, user) of those that anything is kept of for a crash."""
        rows = await self._database.all(
            "SELECT model_id, user FROM operations UNION SELECT model_id, user FROM snapshots"
            " UNION SELECT model_id, user FROM kept_versions"
            " EXCEPT SELECT model_id, user FROM runs WHERE ended_at IS NOT NULL"
        )
        return [(model_id, user) for model_id, user in rows]

    async def is_ended(self, user: str, model_id: str) -> bool:
        """Whether what is kept of it is for replays only."""
        row = await self._database.one(
            "SELECT 1 FROM runs WHERE model_id = ? AND user = ? AND ended_at IS NOT NULL",
            *(model_id, user),
        )
        return row is not None

    async def end_run(self, user: str, model_id: str) -> None:
        """The model is no more: what is kept of it is for replays."""
        of_model = (model_id, user)
        await self._database.write_all(
            (
                "INSERT INTO runs (model_id, user, ended_at) VALUES (?, ?, ?)"
                " ON CONFLICT (model_id) DO UPDATE SET ended_at = excluded.ended_at",
                (*of_model, time.time()),
            ),
            ("DELETE FROM kept_versions WHERE model_id = ? AND user = ?", of_model),
        )

    async def forget(self, user: str, model_id: str) -> None:
        """All that is kept of a model but what is pending."""
        of_model = (model_id, user)
        where = "WHERE model_id = ? AND user = ?"
        await self._database.write_all(
            (f"DELETE FROM operations {where} AND position IS NOT NULL", of_model),
            (f"DELETE FROM snapshots {where}", of_model),
            (f"DELETE FROM kept_versions {where}", of_model),
            ("DELETE FROM numerics WHERE model_id = ?", (model_id,)),
            (f"DELETE FROM runs {where}", of_model),
        )

    # published versions

    async def keep_version(self, user: str, model_id: str, key: str, directory: str) -> str | None:
        """The version of this key is in this folder from now on; the folder that was named before,
        if another."""
        old = await self.version_directory(user, key)
        await self._database.write(
            "INSERT OR REPLACE INTO kept_versions (version_key, user, model_id, directory)"
            " VALUES (?, ?, ?, ?)",
            *(key, user, model_id, directory),
        )
        return None if old == directory else old

    async def kept_versions(self) -> list[KeptVersion]:
        """Of all users: for maintenance."""
        rows = await self._database.all("SELECT version_key, user, directory FROM kept_versions")
        return [KeptVersion(*row) for row in rows]

    async def drop_version(self, kept: KeptVersion) -> None:
        await self._database.write(
            "DELETE FROM kept_versions WHERE version_key = ? AND user = ? AND directory = ?",
            *(kept.key, kept.user, kept.directory),
        )

    async def version_directory(self, user: str, key: str) -> str | None:
        row = await self._database.one(
            "SELECT directory FROM kept_versions WHERE version_key = ? AND user = ?", key, user
        )
        return None if row is None else row["directory"]

    # exactness

    async def numerics(self, user: str, model_id: str) -> Numerics | None:
        """None: nothing was computed."""
        row = await self._database.one(
            "SELECT class, inexact_since FROM runs JOIN numerics USING (model_id)"
            " WHERE model_id = ? AND user = ? ORDER BY position DESC LIMIT 1",
            *(model_id, user),
        )
        return None if row is None else Numerics(*row)

    async def set_numerics(self, user: str, model_id: str, numerics: str, position: int) -> None:
        """The class of what runs after this position."""
        await self._database.write_all(
            ("INSERT OR IGNORE INTO runs (model_id, user) VALUES (?, ?)", (model_id, user)),
            (
                "INSERT OR REPLACE INTO numerics (model_id, position, class) VALUES (?, ?, ?)",
                (model_id, position, numerics),
            ),
        )

    async def set_inexact(self, user: str, model_id: str, position: int) -> int:
        """Since after the operation at this position; of several calls the first counts. The number
        of steps up to there."""
        before = await self._database.one(
            "SELECT position, num_steps FROM snapshots WHERE model_id = ? AND user = ?"
            " AND position <= ? ORDER BY position DESC LIMIT 1",
            *(model_id, user, position),
        )
        after, num_steps = (0, 0) if before is None else (before[0], before[1])
        num_since, _ = await self._since(user, model_id, after, position)
        step = num_steps + num_since
        await self._database.write(
            "UPDATE runs SET inexact_since = COALESCE(inexact_since, ?)"
            " WHERE model_id = ? AND user = ?",
            *(step, model_id, user),
        )
        return step


def begin(request_id: str, ticket: tuple[str, str, str, int], request: bytes) -> Statement:
    """ticket: (user, model_id, kind, seq_id)."""
    return (
        "INSERT INTO operations (request_id, user, model_id, kind, seq_id, request)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (request_id, *ticket, request),
    )


def end(request_id: str, ran: Ran) -> Statement:
    if not ran.applied:
        return "DELETE FROM operations WHERE request_id = ?", (request_id,)
    return (
        "UPDATE operations SET position = ?, applied = 1, digest = ?, took_s = ?, ran_at = ?"
        " WHERE request_id = ?",
        (ran.position, ran.digest, ran.took_s, time.time(), request_id),
    )
