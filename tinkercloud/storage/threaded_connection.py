"""SQLite in a thread of its own: aiosqlite's connection, and transactions in one call of it."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from aiosqlite import Connection

from tinkercloud.storage.connections import Statement, transact


class ThreadedConnection(Connection):
    async def transact(self, statements: Sequence[Statement], /) -> None:
        """As the function `transact`. One call, since each way to the thread and back takes as long
        as a statement, and every acknowledged request waits for it."""
        await self._execute(transact, self._conn, statements)  # pyright: ignore[reportUnknownMemberType]


async def connect(path: Path, timeout_s: float) -> ThreadedConnection:
    """Each statement commits by itself; rows are sqlite3.Row."""

    def opened() -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=timeout_s, isolation_level=None)
        connection.row_factory = sqlite3.Row
        return connection

    connection = ThreadedConnection(opened, iter_chunk_size=64)
    await connection
    return connection
