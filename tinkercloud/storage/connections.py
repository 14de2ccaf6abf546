"""How the database's file is opened: through sqlite3, and where a loop waits through a thread.

Whoever replaces this (a simulated disk) gives connections that do the same.
"""

import sqlite3
from collections.abc import Awaitable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

TIMEOUT_S = 30.0  # for another process that writes
Value = str | bytes | int | float | None
Statement = tuple[str, tuple[Value, ...]]
"""SQL and the values of its parameters."""


class AsyncConnection(Protocol):
    """What is used of `aiosqlite.Connection`, and `transact`. Each statement commits by itself."""

    def execute(self, sql: str, parameters: Iterable[Any] = ..., /) -> Awaitable[object]: ...
    def execute_fetchall(
        self, sql: str, parameters: Iterable[Any] = ..., /
    ) -> Awaitable[Iterable[sqlite3.Row]]: ...
    def transact(self, statements: Sequence[Statement], /) -> Awaitable[None]:
        """As the function `transact`."""
        ...

    def close(self) -> Awaitable[None]: ...


def transact(connection: sqlite3.Connection, statements: Sequence[Statement]) -> None:
    """Execute and commit all of them, or none, with the error of the one that failed."""
    try:
        connection.execute("BEGIN")
        for sql, run in groupby(statements, key=lambda statement: statement[0]):
            connection.executemany(sql, [values for _, values in run])
        connection.commit()
    except Exception:  # a value that SQLite cannot bind is no sqlite3.Error
        connection.rollback()
        raise


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
        from tinkercloud.storage.threaded_connection import connect

        return await connect(path, TIMEOUT_S)


SQLITE = SqliteConnector()
