"""The database as another file: made beside a running server, and checked before it is used."""

import errno
import os
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from tinkercloud.errors import UserError
from tinkercloud.storage.database_file import DATABASE_NAME, named_faults

_DIRECTORIES = "SELECT directory FROM checkpoints ORDER BY directory"
_OF_RUNS = (
    "SELECT directory FROM snapshots UNION SELECT directory FROM kept_versions"
    " UNION SELECT ? || '/' || model_id || '/loaded-' || request_id FROM operations"
    " WHERE kind = 'LoadWeights' AND applied"
)


def copy_database(data_dir: Path, target: Path) -> list[str]:
    """The database as it is now, into the folder `target`; writers go on meanwhile. The folders of
    the checkpoints that it names, relative to data_dir. Raises ConfigError for a database that
    cannot be read, and OSError where the copy has no room."""
    path, source = target / DATABASE_NAME, data_dir / DATABASE_NAME
    path.touch(mode=0o600)
    with closing(sqlite3.connect(path)) as copy, named_faults(source):
        try:
            with closing(_read_only(data_dir)) as reader:
                reader.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")  # one file, nothing beside it
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
            raise
        return [directory for (directory,) in copy.execute(_DIRECTORIES)]


def require_sound(folder: Path, source: Path) -> None:
    """Raises ConfigError for a copy of a damaged database, which would be found out when it is too
    late. source: the data folder that it is of."""
    with named_faults(source / DATABASE_NAME), closing(_read_only(folder)) as reader:
        (fault,) = reader.execute("PRAGMA quick_check(1)").fetchone()
        if fault != "ok":
            raise sqlite3.DatabaseError(fault.splitlines()[-1])


def folders_of_runs(folder: Path, recovery: str) -> list[str]:
    """Of a copy: what models in training come back from, and runs are replayed from, relative to
    the data folder. recovery: the folder of all that."""
    with closing(_read_only(folder)) as reader:
        return [directory for (directory,) in reader.execute(_OF_RUNS, (recovery,))]


def forget_checkpoints(folder: Path, directories: Iterable[str]) -> None:
    """In a copy: of those that were deleted before their files were copied."""
    with closing(sqlite3.connect(folder / DATABASE_NAME)) as copy, copy:
        values = [(directory,) for directory in directories]
        copy.executemany("DELETE FROM checkpoints WHERE directory = ?", values)


def checked_copy(folder: Path) -> list[str]:
    """The folders of the checkpoints that a copy names. Raises UserError for a damaged one."""
    try:
        with closing(_read_only(folder)) as reader:
            faults = [fault for (fault,) in reader.execute("PRAGMA integrity_check")]
            directories = [directory for (directory,) in reader.execute(_DIRECTORIES)]
    except sqlite3.DatabaseError as error:
        raise UserError(f"the database of {folder} is damaged: {error}") from error
    if faults != ["ok"]:
        raise UserError(f"the database of {folder} is damaged: {faults[0]}")
    return directories


def _read_only(folder: Path) -> sqlite3.Connection:
    uri = f"{(folder / DATABASE_NAME).absolute().as_uri()}?mode=ro"
    return sqlite3.connect(uri, uri=True, timeout=30.0)
