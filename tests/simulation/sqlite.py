"""SQLite on the simulated disk: a VFS that tells the disk every write and flush, and connections
that look like sqlite3's and aiosqlite's.

Memory shared by connections (the index of the log) is SQLite's own, on a real folder: a process
that ends loses it, as a machine does. `aiosqlite` gives each connection a thread; here a connection
does one thing after another, each at some later moment.
"""

import asyncio
import random
import sqlite3
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import apsw

from tests.simulation.disk import Disk, File
from tests.simulation.flushes import change_of
from tests.simulation.loop import EPOCH_S, SimulatedLoop
from tinkercloud.storage.connections import transact

VFS_NAME = "simulated"
JULIAN_DAY_OF_EPOCH = 2440587.5


class Vfs(apsw.VFS):
    """disk, loop: of the run; None between runs. changes: of the transaction that something was
    done for last, as `change_of` names them."""

    def __init__(self) -> None:
        super().__init__(VFS_NAME, "unix")
        self.disk: Disk | None = None
        self.loop: SimulatedLoop | None = None
        self.changes: set[str] = set()

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return VfsFile(self.disk, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        path = Path(filename)
        if self.disk is None or not self.disk.holds(path):
            super().xDelete(filename, syncdir)
            return
        self.disk.point("unlink", path)
        super().xDelete(filename, False)
        self.disk.gone(path)
        if syncdir:
            self.disk.synced(path.parent)

    def xRandomness(self, num_bytes: int) -> bytes:
        return random.randbytes(num_bytes)

    def xCurrentTime(self) -> float:
        now = 0.0 if self.loop is None else self.loop.now
        return JULIAN_DAY_OF_EPOCH + (EPOCH_S + now) / 86400

    def xSleep(self, microseconds: int) -> int:
        raise AssertionError("SQLite waits for a lock that nobody can release meanwhile")


class VfsFile(apsw.VFSFile):
    def __init__(self, disk: Disk | None, name: Any, flags: list[int]):
        filename = name.filename() if isinstance(name, apsw.URIFilename) else name
        self._path = Path(filename or "/")
        is_new = filename is not None and not self._path.exists()
        super().__init__("unix", name, flags)
        self._disk = disk if disk is not None and disk.holds(self._path) else None
        self._file: File | None = None
        if self._disk is not None:
            self._file = self._disk.file(self._path)
            if is_new:  # SQLite flushes the folder with the first flush of a log
                self._disk.synced(self._path.parent)

    def xWrite(self, data: bytes, offset: int) -> None:
        if self._disk is not None and self._disk.holds(self._path) and self._file is not None:
            _point(self._disk, "write", self._path)
            super().xWrite(data, offset)
            self._file.writes.append((offset, bytes(data)))
        else:
            super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:
        super().xTruncate(size)
        if self._file is not None:
            self._file.writes.append((size, None))

    def xSync(self, flags: int) -> None:
        if self._disk is not None and self._disk.holds(self._path) and self._file is not None:
            _point(self._disk, "fsync", self._path)
            self._file.sync(None)
            _point(self._disk, "after fsync", self._path)


def _point(disk: Disk, label: str, path: Path) -> None:
    try:
        disk.point(label, path)
    except OSError as error:
        raise (apsw.FullError if error.errno == 28 else apsw.IOError)(str(error)) from error


class Row:
    """As sqlite3.Row."""

    __slots__ = ("_names", "_values")

    def __init__(self, names: Sequence[str], values: Sequence[Any]):
        self._names, self._values = names, values

    def keys(self) -> Sequence[str]:
        return self._names

    def __getitem__(self, key: Any) -> Any:
        return self._values[self._names.index(key) if isinstance(key, str) else key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Rows:
    """What a statement gave, as a cursor of sqlite3."""

    def __init__(self, rows: list[Any]):
        self._rows = rows
        self._next = 0

    def fetchall(self) -> list[Any]:
        return self._rows[self._next :]

    def fetchone(self) -> Any:
        row = self._rows[self._next] if self._next < len(self._rows) else None
        self._next += 1
        return row

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fetchall())


class Connection:
    """As sqlite3.Connection. named: rows are Row, not tuples. refused: where it is noted what broke
    a rule of the tables."""

    def __init__(self, path: Path, refused: list[str], *, autocommit: bool, named: bool):
        self._refused = refused
        self._plain = apsw.Connection(str(path), vfs=VFS_NAME)
        self.is_open = True
        self._autocommit = autocommit
        self._named = named
        self._changes: set[str] = set()

    def execute(self, sql: str, values: Iterable[Any] = ()) -> Rows:
        try:
            self._begin_before(sql)
            cursor = self._plain.cursor().execute(sql, tuple(values))
            rows: list[Any] = []
            names: tuple[str, ...] = ()
            for row in cursor:
                if self._named:
                    names = names or tuple(name for name, _ in cursor.get_description())
                    rows.append(Row(names, row))
                else:
                    rows.append(row)
            return Rows(rows)
        except apsw.Error as error:
            if isinstance(error, apsw.ConstraintError):
                self._refused.append(str(error))
            raise as_sqlite3(error) from error

    def executemany(self, sql: str, values: Iterable[Sequence[Any]]) -> None:
        try:
            self._begin_before(sql)
            self._plain.cursor().executemany(sql, values)
        except apsw.Error as error:
            raise as_sqlite3(error) from error

    def _begin_before(self, sql: str) -> None:
        if not self._plain.in_transaction:
            self._changes.clear()
        change = change_of(sql)
        if change is not None:
            self._changes.add(change)
        VFS.changes = self._changes
        changes = sql.lstrip()[:6].upper() in ("INSERT", "UPDATE", "DELETE", "REPLAC")
        if not self._autocommit and changes and not self._plain.in_transaction:
            self._plain.cursor().execute("BEGIN")

    def commit(self) -> None:
        if self._plain.in_transaction:
            self.execute("COMMIT")

    def rollback(self) -> None:
        if self._plain.in_transaction:
            self.execute("ROLLBACK")

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.commit()
        else:
            self.rollback()

    def close(self) -> None:
        self._plain.close()
        self.is_open = False


def as_sqlite3(error: apsw.Error) -> sqlite3.Error:
    kinds = {
        apsw.ConstraintError: sqlite3.IntegrityError,
        apsw.CorruptError: sqlite3.DatabaseError,
        apsw.NotADBError: sqlite3.DatabaseError,
    }
    same = kinds.get(type(error), sqlite3.OperationalError)(str(error))
    # What a VFS raised comes as it is, without SQLite's number.
    codes = {apsw.FullError: sqlite3.SQLITE_FULL, apsw.IOError: sqlite3.SQLITE_IOERR}
    same.sqlite_errorcode = getattr(error, "extendedresult", 0) or codes.get(
        type(error), getattr(error, "result", sqlite3.SQLITE_ERROR)
    )
    return same


class AsyncConnection:
    """As that of the product: what was asked for is done though its caller was cancelled."""

    def __init__(self, connection: Connection, loop: SimulatedLoop, delay_s: Callable[[], float]):
        self._connection = connection
        self._loop = loop
        self._delay_s = delay_s
        self._settles_at = 0.0
        self._queue: deque[tuple[Any, Callable[..., Any], tuple[Any, ...]]] = deque()

    def execute(self, sql: str, values: Iterable[Any] = ()) -> Awaitable[object]:
        return self._call(self._connection.execute, sql, values)

    def execute_fetchall(self, sql: str, values: Iterable[Any] = ()) -> Awaitable[Any]:
        return self._call(self._connection.execute, sql, values)

    def transact(self, statements: Sequence[Any]) -> Awaitable[None]:
        return self._call(transact, self._connection, statements)

    def close(self) -> Awaitable[None]:
        return self._call(self._connection.close)

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        future = self._loop.create_future()
        self._queue.append((future, function, args))
        if len(self._queue) == 1:
            self._loop.call_later(self._delay_s(), self._do_first)
        return await future

    def _do_first(self) -> None:
        future, function, args = self._queue[0]
        try:
            result = function(*args)
        except Exception as error:  # noqa: BLE001 - for whoever waits
            self._settle_later(future, None, error)
        else:
            self._settle_later(future, result, None)
        self._queue.popleft()
        if self._queue:
            self._loop.call_later(self._delay_s(), self._do_first)

    def _settle_later(self, *result: Any) -> None:
        """In order, but the thread of another connection may be faster."""
        delay_s = self._delay_s()
        self._settles_at = max(self._settles_at, self._loop.now + delay_s)
        if self._settles_at > self._loop.now:
            self._loop.call_at(self._settles_at, _settle, *result)
        else:
            self._loop.call_soon(_settle, *result)


def delay_s(choices: random.Random) -> float:
    """How late the thread of a connection does the next thing."""
    return 0.0 if choices.random() < 0.7 else choices.expovariate(500.0)


def _settle(future: Any, result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class Connector:
    """As `tinkercloud.storage.connections.SqliteConnector`. Connections are closed with the run.
    refused: what broke a rule of the tables; the service asks before it writes."""

    def __init__(self, loop: SimulatedLoop, delay_s: Callable[[], float]):
        self._loop = loop
        self._delay_s = delay_s
        self._opened: list[Connection] = []
        self._num_of_the_dead = 0
        self.refused: list[str] = []

    def begin_process(self) -> None:
        """Nobody closes what is open from before."""
        self._num_of_the_dead = len(self._opened)

    @property
    def num_open(self) -> int:
        """Of the process that runs."""
        return sum(each.is_open for each in self._opened[self._num_of_the_dead :])

    def connect(self, path: Path, *, autocommit: bool = True) -> Any:
        return self._open(path, autocommit=autocommit, named=False)

    async def connect_async(self, path: Path) -> Any:
        connection = self._open(path, autocommit=True, named=True)
        await asyncio.sleep(self._delay_s())
        return AsyncConnection(connection, self._loop, self._delay_s)

    def _open(self, path: Path, *, autocommit: bool, named: bool) -> Connection:
        try:
            connection = Connection(path, self.refused, autocommit=autocommit, named=named)
        except apsw.Error as error:
            raise as_sqlite3(error) from error
        self._opened.append(connection)
        return connection

    def close_all(self) -> None:
        for connection in self._opened:
            connection.close()
        self._opened.clear()


VFS = Vfs()
