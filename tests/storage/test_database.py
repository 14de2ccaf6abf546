"""Group commits and their isolation."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.storage.counting import commits_of
from tinkercloud.errors import ServerFault, StorageFailed
from tinkercloud.storage.database import LOG_BYTES, Database
from tinkercloud.storage.database_file import prepare_database_file
from tinkercloud.storage.futures import FuturesStorage, Ticket, completed_protobuf

MIB = 1024**2
INSERT = "INSERT INTO keys (key_id, user, sha256, created_at) VALUES (?, ?, ?, 1.0)"


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = await Database.open(tmp_path)
    yield database
    await database.close()


async def names(database: Database) -> list[str]:
    return [row["key_id"] for row in await database.all("SELECT key_id FROM keys ORDER BY key_id")]


async def test_a_write_is_seen_once_it_has_returned(database: Database) -> None:
    await database.write(INSERT, "a", "ann", b"1")
    assert await names(database) == ["a"]


async def test_concurrent_writes_share_commits(database: Database) -> None:
    commits = commits_of(database)
    await asyncio.gather(
        *(database.write(INSERT, f"{i:03}", "ann", str(i).encode()) for i in range(200))
    )
    assert len(await names(database)) == 200
    assert len(commits) < 20


async def test_writes_keep_their_order(database: Database) -> None:
    await asyncio.gather(
        database.write(INSERT, "a", "ann", b"1"),
        database.write("UPDATE keys SET key_id = 'b' WHERE key_id = 'a'"),
        database.write(INSERT, "a", "ann", b"2"),
    )
    assert await names(database) == ["a", "b"]


async def test_a_faulty_write_fails_alone(database: Database) -> None:
    results = await asyncio.gather(
        database.write(INSERT, "a", "ann", b"1"),
        database.write(INSERT, "a", "ann", b"2"),
        database.write(INSERT, "b", "ann", b"3"),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [type(None), sqlite3.IntegrityError, type(None)]
    assert await names(database) == ["a", "b"]


TOO_LARGE = 2**63
"""For SQLite: binding it is an OverflowError, no sqlite3.Error."""


async def test_a_value_that_sqlite_does_not_have_fails_its_own_writes_alone(
    database: Database,
) -> None:
    """In a transaction, and alone; the writer goes on after both."""
    results = await asyncio.gather(
        database.write(INSERT, "a", "ann", b"1"),
        database.write_all(
            (INSERT, ("b", "ann", b"2")), ("DELETE FROM keys WHERE created_at = ?", (TOO_LARGE,))
        ),
        database.write("DELETE FROM keys WHERE created_at = ?", TOO_LARGE),
        database.write(INSERT, "c", "ann", b"3"),
        return_exceptions=True,
    )
    none = type(None)
    assert [type(result) for result in results] == [none, OverflowError, OverflowError, none]
    await database.write_all((INSERT, ("d", "ann", b"4")), (INSERT, ("e", "ann", b"5")))
    assert await names(database) == ["a", "c", "d", "e"]


async def test_a_folder_that_became_read_only_is_named_and_serves_again_when_it_is_not(
    database: Database,
) -> None:
    """SQLite's own error of a read-only file, single and in a group."""
    await database._writer.execute("PRAGMA query_only = ON")
    writes = [database.write(INSERT, name, "ann", name.encode()) for name in "ab"]
    errors = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(error) for error in errors] == [StorageFailed] * 2
    assert all("cannot be written" in str(error) for error in errors)
    await database._writer.execute("PRAGMA query_only = OFF")
    await database.write(INSERT, "c", "ann", b"c")
    assert await names(database) == ["c"]


async def test_a_probe_writes_each_time(database: Database, tmp_path: Path) -> None:
    """SQLite leaves a row alone that is given the values that it has."""
    log = tmp_path / "tinkercloud.db-wal"
    sizes = []
    for _ in range(3):
        await database.probe()
        sizes.append(log.stat().st_size)
    assert sizes[0] < sizes[1] < sizes[2]


async def test_the_reading_connection_cannot_write(database: Database) -> None:
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        await database.all("DELETE FROM keys")


async def test_closing_commits_what_is_queued(tmp_path: Path) -> None:
    database = await Database.open(tmp_path)
    queued = [
        asyncio.create_task(database.write(INSERT, str(i), "ann", str(i).encode()))
        for i in range(5)
    ]
    await asyncio.sleep(0)
    await database.close()
    await asyncio.gather(*queued)
    with pytest.raises(ServerFault, match="shutting down"):
        await database.write(INSERT, "late", "ann", b"late")
    again = await Database.open(tmp_path)
    assert len(await names(again)) == 5
    await again.close()


async def test_a_write_whose_caller_left_is_made_all_the_same(database: Database) -> None:
    task = asyncio.create_task(database.write(INSERT, "a", "ann", b"1"))
    await asyncio.sleep(0)
    task.cancel()
    await database.write(INSERT, "b", "ann", b"2")
    assert await names(database) == ["a", "b"]


async def test_the_room_of_what_was_deleted_goes_back_to_the_file_system(tmp_path: Path) -> None:
    path = tmp_path / "tinkercloud.db"
    database = await Database.open(tmp_path)
    futures = FuturesStorage(database)
    for number in range(3):
        await futures.add(str(number), Ticket("ann", "ForwardBackward"), in_lane=False)
        await futures.finish(str(number), completed_protobuf(bytes(6 * MIB)))
    assert await database.num_bytes() > 18 * MIB
    assert await futures.keep_within(14 * MIB, spared_s=600.0) == 0, "they are young"
    assert await futures.keep_within(20 * MIB, spared_s=0.0) == 0
    assert await futures.keep_within(14 * MIB, spared_s=0.0) == 1
    assert await futures.outcome("0", "ann") is None, "the oldest"
    assert await futures.outcome("1", "ann") is not None
    await futures.expire(ttl_s=0.0)
    await asyncio.gather(database.shrink(), database.write(INSERT, "a", "ann", b"1"))
    assert await names(database) == ["a"]
    await database.close()
    assert path.stat().st_size < 6 * MIB
    assert not path.with_name(path.name + "-wal").exists()


async def test_the_log_of_a_large_write_does_not_stay(tmp_path: Path) -> None:
    database = await Database.open(tmp_path)
    await database.write(INSERT, "a", "ann", bytes(60 * MIB))
    log = tmp_path / "tinkercloud.db-wal"
    for number in range(3):
        await database.write(INSERT, str(number), "ann", str(number).encode())
    assert log.stat().st_size <= LOG_BYTES
    await database.close()


def test_the_file_of_an_earlier_version_can_shrink_too(tmp_path: Path) -> None:
    path = tmp_path / "tinkercloud.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE own (x)")
        connection.commit()
    prepare_database_file(tmp_path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
