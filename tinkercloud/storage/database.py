"""One SQLite file, one writer task. Writes queue up and are committed in groups.

A group is whatever arrived while the previous commit ran, so that a hundred concurrent submissions
cost a few commits instead of a hundred. A commit is flushed to the disk: what `write` has returned
from survives the end of the process, however it ends, and a power cut.
"""

import asyncio
import logging
import os
import sqlite3
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tinkercloud.errors import DatabaseDamaged, ServerFault, StorageFailed
from tinkercloud.storage.connections import SQLITE, AsyncConnection, Connector, Statement, Value
from tinkercloud.storage.database_file import named_faults, prepare_database_file

logger = logging.getLogger(__name__)

Row = sqlite3.Row
_NO_WRITES = {
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY),
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM),
}
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
MAX_GROUP = 1000  # writes per commit, so that one commit stays well below a second
SHRINK_PAGES = 1000  # at once, so that other writes wait some milliseconds only
MAX_FREE_PAGES = 1000
"""That stay in the file for what is written next."""
LOG_BYTES = 16 * 1024**2
"""What stays of the write-ahead log after a large write."""


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    """alone: in no transaction with others."""

    statements: tuple[Statement, ...]
    done: asyncio.Future[None] = field(repr=False)
    alone: bool = False


class Database:
    """Reads see every write that has returned. Both raise DatabaseDamaged."""

    def __init__(self, writer: AsyncConnection, reader: AsyncConnection):
        self._writer = writer
        self._reader = reader
        self._queue: asyncio.Queue[_Write | None] = asyncio.Queue()
        self._closed = False
        self._task = asyncio.create_task(self._write_until_closed(), name="database writer")

    @classmethod
    async def open(cls, data_dir: Path, connector: Connector = SQLITE) -> "Database":
        """The database of data_dir, made where missing. Raises ConfigError."""
        path = prepare_database_file(data_dir, connector)
        async with AsyncExitStack() as opened:
            with named_faults(path):
                writer = await _connect(path, connector, opened)
                reader = await _connect(path, connector, opened)
                await reader.execute("PRAGMA query_only = ON")
            opened.pop_all()
        return cls(writer, reader)

    async def close(self) -> None:
        """Commit what is queued, then close. Later writes raise ServerFault."""
        self._closed = True
        self._queue.put_nowait(None)
        await self._task
        await self._reader.close()
        await self._writer.close()

    async def write(self, sql: str, *values: Value) -> None:
        """Execute one statement; return when it is committed. Raises StorageFailed, and errors of
        its own only: sqlite3.Error, and OverflowError for a number that SQLite does not have."""
        await self.write_all((sql, values))

    async def write_all(self, *statements: Statement) -> None:
        """The same of several, in their order: all of them take effect, or none."""
        await self._queued(statements)

    async def _queued(self, statements: tuple[Statement, ...], *, alone: bool = False) -> None:
        if self._closed:
            raise ServerFault("the server is shutting down")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Write(statements, done, alone))
        await done

    async def num_bytes(self) -> int:
        """Of the file, without what deleted rows have left in it. Cheap."""
        num_pages = await self._pragma("page_count") - await self._pragma("freelist_count")
        return num_pages * await self._pragma("page_size")

    async def shrink(self) -> None:
        """Give the room of deleted rows back to the file system, piece by piece. Raises
        StorageFailed."""
        num_free = await self._pragma("freelist_count")
        while num_free > MAX_FREE_PAGES:
            statement = (f"PRAGMA incremental_vacuum({SHRINK_PAGES})", ())
            await self._queued((statement,), alone=True)
            before, num_free = num_free, await self._pragma("freelist_count")
            if num_free >= before:
                return

    async def _pragma(self, name: str) -> int:
        row = await self.one(f"PRAGMA {name}")
        assert row is not None
        return row[0]

    async def probe(self) -> None:
        """Write and commit a row that nobody reads. Raises StorageFailed."""
        # Another value each time: what a row has already SQLite does not write.
        await self.write("INSERT OR REPLACE INTO secrets VALUES ('probe', ?)", os.urandom(16))

    async def all(self, sql: str, *values: Value) -> list[Row]:
        try:
            return list(await self._reader.execute_fetchall(sql, values))
        except sqlite3.DatabaseError as error:
            named = _named(error)
            if isinstance(named, DatabaseDamaged):
                raise named from error
            raise

    async def one(self, sql: str, *values: Value) -> Row | None:
        rows = await self.all(sql, *values)
        return rows[0] if rows else None

    async def _write_until_closed(self) -> None:
        closing = False
        while not closing:
            first = await self._queue.get()
            group = [] if first is None else [first]
            closing = first is None
            while len(group) < MAX_GROUP and not self._queue.empty():
                write = self._queue.get_nowait()
                if write is None:
                    closing = True
                else:
                    group.append(write)
            await self._commit([write for write in group if not write.alone])
            for write in group:
                if write.alone:
                    await self._commit([write])

    async def _commit(self, group: Sequence[_Write]) -> None:
        try:
            await self._execute(group)
        except Exception as error:  # a value that SQLite cannot bind is no sqlite3.Error
            if len(group) > 1:  # only the faulty write may fail, not the others
                for write in group:
                    await self._commit([write])
                return
            logger.exception("a database write failed")
            _settle(group, _named(error))
        else:
            _settle(group, None)

    async def _execute(self, group: Sequence[_Write]) -> None:
        statements = [statement for write in group for statement in write.statements]
        if not statements:
            return
        if group[0].alone:  # to its end: what SQLite does for it, it does row by row
            await self._writer.execute_fetchall(*statements[0])
            return
        if len(statements) == 1:  # it commits by itself
            await self._writer.execute(*statements[0])
            return
        await self._writer.transact(statements)


def _named(error: Exception) -> Exception:
    """sqlite3 raises some errors of its own, which have no code of SQLite's."""
    code = getattr(error, "sqlite_errorcode", 0)
    if code & 0xFF in _DAMAGE:
        return DatabaseDamaged(str(error))
    return StorageFailed(str(error)) if code & 0xFF in _NO_WRITES else error


def _settle(group: Sequence[_Write], error: Exception | None) -> None:
    for write in group:
        if write.done.done():  # its caller was cancelled; the row is written all the same
            continue
        if error is None:
            write.done.set_result(None)
        else:
            write.done.set_exception(error)


async def _connect(path: Path, connector: Connector, opened: AsyncExitStack) -> AsyncConnection:
    """opened: closes it."""
    connection = await connector.connect_async(path)
    opened.push_async_callback(connection.close)  # its thread would keep the process
    await connection.execute("PRAGMA journal_mode = WAL")
    # Some milliseconds a commit: what was acknowledged is there after a power cut.
    await connection.execute("PRAGMA synchronous = FULL")
    await connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
    return connection
