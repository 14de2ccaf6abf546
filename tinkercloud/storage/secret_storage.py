"""Secrets that the server draws once and keeps: in the database, a file of mode 0600."""

import secrets

from tinkercloud.storage.database import Database

NUM_BYTES = 32


class SecretStorage:
    def __init__(self, database: Database):
        self._database = database

    async def get(self, name: str) -> bytes:
        """The secret of that name, drawn at its first use; the same for all processes."""
        await self._database.write_through(
            "INSERT OR IGNORE INTO secrets (name, value) VALUES (?, ?)",
            *(name, secrets.token_bytes(NUM_BYTES)),
        )
        row = await self._database.one("SELECT value FROM secrets WHERE name = ?", name)
        assert row is not None, "it was just written"
        return row["value"]
