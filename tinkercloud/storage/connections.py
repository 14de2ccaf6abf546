"""How the database's file is opened: through sqlite3, and where a loop waits through a thread.

Whoever replaces this (a simulated disk) gives connections that do the same.
"""

import sqlite3
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any, Protocol

TIMEOUT_S = 30.0  # for another process that writes


class AsyncConnection(Protocol):
    """What is used of `aiosqlite.Connection`. Outside of BEGIN each statement commits by itself."""

    def execute(self, sql: str, parameters: Iterable[Any] = ..., /) -> Awaitable[object]: ...
    def executemany(
        self, sql: str, parameters: Iterable[Iterable[Any]], /
    ) -> Awaitable[object]: ...
    def execute_fetchall(
        self, sql: str, parameters: Iterable[Any] = ..., /
    ) -> Awaitable[Iterable[sqlite3.Row]]: ...
    def commit(self) -> Awaitable[None]: ...
    def rollback(self) -> Awaitable[None]: ...
    def close(self) -> Awaitable[None]: ...


class Connector(Protocol):
    """Opens connections to an existing file. Raises sqlite3.Error."""

    def connect(self, path: Path, *, autocommit: bool = True) -> sqlite3.Connection:
        """autocommit False: a change begins a transaction, which the caller ends."""
        ...

    async def connect_async(self, path: Path) -> AsyncConnection:
        """Rows are sqlite3.Row."""
        ...


class SqliteConnector:
    def connect(self, path: Path, *, autocommit: bool = True) -> sqlite3.Connection:
        level = None if autocommit else "DEFERRED"
        return sqlite3.connect(
            path, timeout=TIMEOUT_S, isolation_level=level, check_same_thread=False
        )

    async def connect_async(self, path: Path) -> AsyncConnection:
        # Here: commands that read keys need no package of the server's.
        import aiosqlite

        connection = await aiosqlite.connect(path, timeout=TIMEOUT_S, isolation_level=None)
        connection.row_factory = sqlite3.Row
        return connection


SQLITE = SqliteConnector()
