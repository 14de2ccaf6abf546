"""Files of earlier versions, of later ones, damaged ones.

`databases/N.sql` is the dump of a file of number N, made by the version that had it: two users, a
trained model, checkpoints, a published one, a recorded sample, a capture session.
"""

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.api.harness import serving
from tinkercloud.errors import ConfigError
from tinkercloud.storage import database_file
from tinkercloud.storage.database_file import DATABASE_NAME, MIGRATIONS, prepare_database_file
from tinkercloud.storage.keys import KeyStore

DUMPS = sorted((Path(__file__).parent / "databases").glob("*.sql"))
SCHEMAS = {
    1: "78f02203b8b90563",
    2: "5545bbff36fa4a3a",
    3: "ebe9985184bb8243",
    4: "ed1a4f9491780fad",
    5: "71f3c7cfe253cf4e",
}
"""Digests of the tables of each number."""
TO_DO = "add a numbered change, a line to SCHEMAS, and a dump of the number before to databases/"


def connected(path: Path) -> "closing[sqlite3.Connection]":
    return closing(sqlite3.connect(path, isolation_level=None))


def tables(connection: sqlite3.Connection) -> list[str]:
    query = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
    return [name for (name,) in connection.execute(query)]


def described(path: Path) -> list[object]:
    """All that statements see of the tables, and the indices and triggers."""
    with connected(path) as connection:
        columns = [
            (name, *connection.execute(f"PRAGMA table_info({name})").fetchall())
            for name in tables(connection)
        ]
        query = "SELECT type, name, sql FROM sqlite_master WHERE type != 'table' ORDER BY name"
        return [columns, connection.execute(query).fetchall()]


def dumped(folder: Path, dump: Path) -> Path:
    folder.mkdir()
    path = folder / DATABASE_NAME
    with connected(path) as connection:
        connection.executescript(dump.read_text(encoding="utf-8"))
        connection.execute(f"PRAGMA user_version = {int(dump.stem)}")
    return path


def rows(path: Path) -> Iterator[tuple[str, list[dict[str, object]]]]:
    with connected(path) as connection:
        connection.row_factory = sqlite3.Row
        for name in tables(connection):
            found = connection.execute(f"SELECT * FROM {name} ORDER BY 1, 2").fetchall()
            yield name, [dict(row) for row in found]


@pytest.mark.parametrize("dump", DUMPS, ids=lambda dump: dump.stem)
def test_a_file_of_an_earlier_version_keeps_its_rows_and_gets_the_tables_of_this_one(
    tmp_path: Path, dump: Path
) -> None:
    path = dumped(tmp_path / "old", dump)
    before = dict(rows(path))
    assert sum(len(found) for found in before.values()) > 20
    for _ in range(2):  # again: without effect
        assert prepare_database_file(path.parent) == path
        after = dict(rows(path))
        for name, found in before.items():
            pairs = zip(found, after[name], strict=True)
            kept = [{key: row[key] for key in old} for old, row in pairs]
            assert kept == found, name
        assert described(path) == described(prepare_database_file(tmp_path / "new"))


@pytest.mark.parametrize("dump", DUMPS, ids=lambda dump: dump.stem)
async def test_a_server_goes_on_with_the_file_of_an_earlier_version(
    tmp_path: Path, dump: Path
) -> None:
    path = dumped(tmp_path / "data", dump)
    with connected(path) as connection:
        [(user, public)] = connection.execute(
            "SELECT user, EXISTS (SELECT 1 FROM published) FROM models"
        ).fetchall()
    async with serving(path.parent) as api:
        runs = (await api.as_user(user).get("training_runs")).json()["training_runs"]
        assert len(runs) == 1
        assert public
        sampler = await api.sampler(await api.session())
        await api.result(await api.sample(sampler))


def test_every_number_has_its_tables(tmp_path: Path) -> None:
    text = repr(described(prepare_database_file(tmp_path)))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert digest == SCHEMAS[len(MIGRATIONS)], TO_DO
    assert [int(dump.stem) for dump in DUMPS] == list(range(len(MIGRATIONS)))


def test_a_file_of_a_later_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = prepare_database_file(tmp_path)
    with connected(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    content = path.read_bytes()
    with pytest.raises(ConfigError, match=r"later version.*99.*backup"):
        KeyStore(tmp_path)
    assert path.read_bytes() == content


def test_a_change_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dumped(tmp_path / "old", DUMPS[0])
    before = described(path)

    def broken(connection: sqlite3.Connection) -> None:
        MIGRATIONS[0](connection)
        connection.execute("INSERT INTO nowhere VALUES (1)")

    with monkeypatch.context() as patched:
        patched.setattr(database_file, "MIGRATIONS", (broken,))
        with pytest.raises(ConfigError, match="nowhere"):
            prepare_database_file(path.parent)
    assert described(path) == before
    prepare_database_file(path.parent)
    assert described(path) != before


@pytest.mark.parametrize("content", [b"no database" * 900, b"SQLite format 3\0" + b"x" * 5000])
def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path, content: bytes) -> None:
    (tmp_path / DATABASE_NAME).write_bytes(content)
    with pytest.raises(ConfigError, match=r"damaged.*tinkercloud restore"):
        prepare_database_file(tmp_path)


def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--data-dir"):
        prepare_database_file(tmp_path / "file" / "data")
