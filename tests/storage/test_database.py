"""Group commits and their isolation."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.storage.counting import commits_of
from tinkercloud.errors import ServerFault
from tinkercloud.storage.database import Database

INSERT = "INSERT INTO keys VALUES (?, ?, ?, 1.0)"


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
