"""Published checkpoints: what every user of this server may read."""

import time

from tinkercloud.storage.database import Database
from tinkercloud.storage.metadata import (
    ALIVE,
    CHECKPOINTS,
    Checkpoint,
    Model,
    checkpoint_of,
    model_of,
)

_UNEXPIRED = ALIVE.replace("?", "?2")
_ACCESSIBLE = (
    "state != 'failed' AND (?1 IS NULL OR user = ?1"
    " OR EXISTS (SELECT 1 FROM checkpoints JOIN published"
    f" USING (directory) WHERE checkpoints.model_id = models.model_id AND {_UNEXPIRED}))"
)


class PublicationStorage:
    """A publication is of one saved folder: what is saved over it is private again."""

    def __init__(self, database: Database):
        self._database = database

    async def publish(self, checkpoint: Checkpoint) -> None:
        """Publishing twice changes nothing."""
        await self._database.write(
            "INSERT OR IGNORE INTO published (directory, published_at) VALUES (?, ?)",
            *(checkpoint.directory, time.time()),
        )

    async def unpublish(self, checkpoint: Checkpoint) -> None:
        await self._database.write(
            "DELETE FROM published WHERE directory = ?", checkpoint.directory
        )

    async def checkpoint(self, model_id: str, segment: str, name: str) -> Checkpoint | None:
        """A published one, whoever owns it."""
        row = await self._database.one(
            f"{CHECKPOINTS} WHERE model_id = ? AND segment = ? AND name = ? AND {ALIVE}"
            " AND published.directory IS NOT NULL",
            *(model_id, segment, name, time.time()),
        )
        return None if row is None else checkpoint_of(row)

    async def at_directory(self, directory: str, user: str) -> Checkpoint | None:
        """What the user may read there: an own checkpoint or a published one."""
        row = await self._database.one(
            f"{CHECKPOINTS} WHERE directory = ? AND {ALIVE}"
            " AND (user = ? OR published.directory IS NOT NULL)",
            *(directory, time.time(), user),
        )
        return None if row is None else checkpoint_of(row)

    async def owner(self, directory: str) -> str | None:
        """Whose checkpoint is saved there; None: nobody's any more."""
        row = await self._database.one(
            "SELECT user FROM checkpoints WHERE directory = ?", directory
        )
        return None if row is None else row["user"]

    async def of_model(self, model_id: str) -> list[Checkpoint]:
        """The published checkpoints of a model, newest first."""
        rows = await self._database.all(
            f"{CHECKPOINTS} WHERE model_id = ? AND {ALIVE} AND published.directory IS NOT NULL"
            " ORDER BY created_at DESC, segment, name",
            *(model_id, time.time()),
        )
        return [checkpoint_of(row) for row in rows]

    async def accessible_model(self, model_id: str, user: str) -> Model | None:
        """The user's own model, or one with a published checkpoint."""
        row = await self._database.one(
            f"SELECT * FROM models WHERE {_ACCESSIBLE} AND model_id = ?3",
            *(user, time.time(), model_id),
        )
        return None if row is None else model_of(row)

    async def accessible_models(self, user: str | None, limit: int, offset: int) -> list[Model]:
        """Newest first. user None: everybody's."""
        rows = await self._database.all(
            f"SELECT * FROM models WHERE {_ACCESSIBLE}"
            " ORDER BY created_at DESC, model_id LIMIT ?3 OFFSET ?4",
            *(user, time.time(), limit, offset),
        )
        return [model_of(row) for row in rows]

    async def num_accessible_models(self, user: str | None) -> int:
        row = await self._database.one(
            f"SELECT COUNT(*) AS num FROM models WHERE {_ACCESSIBLE}", user, time.time()
        )
        return 0 if row is None else row["num"]
