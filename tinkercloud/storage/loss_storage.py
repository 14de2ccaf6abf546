"""Custom losses: graphs that clients have uploaded."""

import time

from tinkercloud.storage.database import Database


class LossStorage:
    def __init__(self, database: Database):
        self._database = database

    async def add(self, loss_id: str, user: str, session_id: str, body: str) -> None:
        """Nothing happens where there is one of that id."""
        await self._database.write(
            "INSERT OR IGNORE INTO custom_losses VALUES (?, ?, ?, ?, ?)",
            *(loss_id, user, session_id, body, time.time()),
        )

    async def body(self, loss_id: str, user: str, session_id: str) -> str | None:
        """None: unknown, or of another user or session."""
        row = await self._database.one(
            "SELECT body FROM custom_losses WHERE loss_id = ? AND user = ? AND session_id = ?",
            *(loss_id, user, session_id),
        )
        return None if row is None else row["body"]

    async def num_of_session(self, session_id: str) -> int:
        row = await self._database.one(
            "SELECT COUNT(*) AS num FROM custom_losses WHERE session_id = ?", session_id
        )
        return 0 if row is None else row["num"]

    async def delete_session(self, session_id: str) -> None:
        await self._database.write("DELETE FROM custom_losses WHERE session_id = ?", session_id)
