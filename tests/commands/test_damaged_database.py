"""A database with a page that is not as it was written: whoever comes to it says so and ends, or
goes on without what needs it."""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from tests.api.harness import serving
from tinkercloud.app import create_app
from tinkercloud.cli import main
from tinkercloud.config import Config
from tinkercloud.errors import ConfigError
from tinkercloud.storage.database_file import DATABASE_NAME, prepare_database_file

ADVICE = "restore a backup (tinkercloud restore)"


def damaged(data_dir: Path, table: str) -> Path:
    """A folder whose database has the first pages of this table and its indices overwritten."""
    path = prepare_database_file(data_dir)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page_size,) = connection.execute("PRAGMA page_size").fetchone()
        query = "SELECT rootpage FROM sqlite_master WHERE tbl_name = ? AND rootpage"
        pages = [page for (page,) in connection.execute(query, (table,))]
    with path.open("r+b") as file:
        for page in pages:
            file.seek((page - 1) * page_size)
            file.write(b"\xff" * page_size)
    return data_dir


@pytest.mark.parametrize("table", ["secrets", "futures"])
async def test_a_server_does_not_start_on_it_and_leaves_no_thread_that_keeps_its_process(
    tmp_path: Path, table: str
) -> None:
    damaged(tmp_path, table)
    before = set(threading.enumerate())
    app = create_app(Config(data_dir=tmp_path, backend="fake"))
    with pytest.raises(ConfigError, match=r"damaged.*malformed") as refused:
        async with app.router.lifespan_context(app):
            pass
    assert ADVICE in str(refused.value)
    for thread in set(threading.enumerate()) - before:
        if not thread.name.startswith("asyncio_"):  # those of the loop end with it
            thread.join(10)
            assert not thread.is_alive(), thread


async def test_a_server_that_meets_it_says_so_and_serves_the_rest(tmp_path: Path) -> None:
    async with serving(damaged(tmp_path, "samplers")) as api:
        answer = await api.get("samplers/unknown:sample:0")
        assert answer.status_code == 503
        assert ADVICE in answer.json()["detail"]
        assert (await api.post("create_session", tags=[])).status_code == 200


def test_commands_say_it_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, folder = damaged(tmp_path / "data", "operations"), tmp_path / "backup"
    place = ["--data-dir", str(data)]
    assert main(["replay", "run", "--list", "--backend", "fake", *place]) == 1
    assert ADVICE in capsys.readouterr().err
    assert main(["backup", str(folder), *place]) == 2
    said = capsys.readouterr().err
    assert f"{data / DATABASE_NAME} is damaged" in said
    assert ADVICE in said
    assert list(tmp_path.iterdir()) == [data]
