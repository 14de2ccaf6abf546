"""Whose something is: for administrators, who name it by its id alone."""

from typing import Literal

from tinkercloud.storage.database import Database

Kind = Literal["model", "session", "sampler", "request", "capture"]

_QUERIES: dict[Kind, str] = {
    "model": "SELECT user FROM models WHERE model_id = ?",
    "session": "SELECT user FROM sessions WHERE session_id = ?",
    "sampler": "SELECT user FROM samplers WHERE sampler_id = ?",
    "request": "SELECT user FROM futures WHERE request_id = ?",
    "capture": "SELECT user FROM captures WHERE capture_id = ?",
}


class Owners:
    def __init__(self, database: Database):
        self._database = database

    async def of(self, kind: Kind, name: str) -> str | None:
        """None: there is no such thing."""
        row = await self._database.one(_QUERIES[kind], name)
        return None if row is None else row["user"]
