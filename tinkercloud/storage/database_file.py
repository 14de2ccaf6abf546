"""The database's file: made where missing, and brought to the tables of this version.

`schema.sql` is what a new file gets. A file of an earlier version goes through the numbered changes
after its own number, which SQLite keeps in the file (`PRAGMA user_version`), in one transaction.
"""

import logging
import sqlite3
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path

from tinkercloud.errors import ConfigError
from tinkercloud.storage.connections import SQLITE, Connector

DATABASE_NAME = "tinkercloud.db"
_INCREMENTAL = 2  # of PRAGMA auto_vacuum
logger = logging.getLogger(__name__)


def prepare_database_file(data_dir: Path, connector: Connector = SQLITE) -> Path:
    """Make data_dir (mode 0700) and a database file (0600) where missing, with the tables of this
    version; its path. Raises ConfigError for a file that cannot be used, with what to do."""
    path = data_dir / DATABASE_NAME
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        data_dir.chmod(0o700)
        path.touch(mode=0o600, exist_ok=True)
        path.chmod(0o600)
    except OSError as error:
        raise unwritable(data_dir, error) from error
    with named_faults(path), closing(connector.connect(path)) as connection:
        _let_it_shrink(connection)
        migrate(connection)
    return path


@contextmanager
def named_faults(path: Path) -> Generator[None]:
    """ConfigError with advice for what SQLite raises of this file."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise ConfigError(_advice(path, error)) from error


def unwritable(data_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the data folder {data_dir} cannot be written ({error.strerror}); name another one "
        "with --data-dir, or give this user the right to write there"
    )


def _let_it_shrink(connection: sqlite3.Connection) -> None:
    """The file can give back the room of deleted rows. One of an earlier version is written anew
    for that, once; where there is no room for it, or another process is in it, at a later start."""
    if connection.execute("PRAGMA auto_vacuum").fetchone()[0] == _INCREMENTAL:
        return
    connection.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
    if connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
        try:
            connection.execute("VACUUM")
        except sqlite3.OperationalError as error:
            logger.warning("the database stays as large as it was: %s", error)


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the file to the tables of this version; all of it or nothing. connection: in no
    transaction, and beginning none by itself. Raises ConfigError for a file of a later version."""
    if _number(connection) == len(MIGRATIONS):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        number = _number(connection)  # another process may have done it meanwhile
        if number > len(MIGRATIONS):
            raise ConfigError(
                f"the database has the tables of a later version of tinkercloud (number {number}, "
                f"this one knows {len(MIGRATIONS)}); start that version, or restore a backup that "
                "this one made"
            )
        if connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            for change in MIGRATIONS[number:]:
                change(connection)
        for statement in _statements(_schema()):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        connection.execute("COMMIT")
    except BaseException:  # Ctrl-C too: all migrations or none
        connection.execute("ROLLBACK")
        raise


def _number(connection: sqlite3.Connection) -> int:
    """Of the last change that the file went through; 0: of a file that is new, or from before
    changes had numbers."""
    return connection.execute("PRAGMA user_version").fetchone()[0]


def _schema() -> str:
    return files("tinkercloud.storage").joinpath("schema.sql").read_text(encoding="utf-8")


def _statements(script: str) -> Iterator[str]:
    """One by one: `executescript` would commit what was done before."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    assert not statement.strip(), f"no end: {statement}"


def _advice(path: Path, error: sqlite3.DatabaseError) -> str:
    if isinstance(error, sqlite3.OperationalError):  # locked, full, read-only
        return (
            f"the database {path} cannot be opened: {error}. See that the disk has room, that the "
            "file can be written, and that no other program holds it"
        )
    return (
        f"the database {path} is damaged ({error}). Move it aside and restore a backup "
        "(tinkercloud restore); what checkpoints/ beside it holds is whole in itself"
    )


# ---- the changes, in order; what is on somebody's disk never changes


def _add_columns_of_futures(connection: sqlite3.Connection) -> None:
    """Whose sample it is, when its work began, and what it asks for. Files from before changes had
    numbers have any of them."""
    _add_columns(connection, "futures", sampler_id="TEXT", started_at="REAL", request="BLOB")


def _add_requests(connection: sqlite3.Connection) -> None:
    """The operation that made a checkpoint or a sampler: it may begin again, and must find what it
    has done."""
    _add_columns(connection, "checkpoints", request_id="TEXT")
    _add_columns(connection, "samplers", request_id="TEXT")


def _add_digests(connection: sqlite3.Connection) -> None:
    """Of what a request asks for: another one with its number is refused."""
    _add_columns(connection, "futures", digest="BLOB")


def _add_roles(connection: sqlite3.Connection) -> None:
    """Keys from before there were roles and quotas do what they did."""
    role, quota = "TEXT NOT NULL DEFAULT 'user'", "TEXT NOT NULL DEFAULT '{}'"
    _add_columns(connection, "keys", role=role, quota=quota)


def _add_tables(connection: sqlite3.Connection) -> None:
    """Of metrics that scripts report: schema.sql makes it where it is missing."""


def _add_columns(connection: sqlite3.Connection, table: str, **columns: str) -> None:
    there = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
    for name, kind in columns.items():
        if there and name not in there:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")


MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (
    _add_columns_of_futures,
    _add_requests,
    _add_digests,
    _add_roles,
    _add_tables,
)
