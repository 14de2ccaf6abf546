"""The recovery benchmark's figures, and the servers that it compares."""

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import recovery, recovery_proofs, recovery_steps
from benchmarks.lib import training_http
from benchmarks.lib.recovery_server import MODE, MODULE, WithoutFlush
from benchmarks.recovery_restart import Restart, last_replay, targets
from tests.embedded.tiny import write_tiny_model
from tests.serving import Server, running
from tinkercloud.storage.database import Database


def test_the_slowest_restart_is_held_against_the_goal() -> None:
    fast = Restart("engine", "bfloat16", 10, 11, None, 0.1, 2.0, 1.0)
    slow = Restart("server", "float32", 10, 11, 6.0, 6.1, 9.0, 1.0)
    assert [each.met for each in targets([fast])] == [True]
    assert [(each.value, each.met) for each in targets([fast, slow])] == [(6.1, False)]
    assert fast.cells()[4] == "-"


def test_the_last_replay_of_a_log_counts() -> None:
    log = "m is back: no snapshot and 11 operations, in 1.5 s\nm is back: the snapshot of 11 and 3"
    assert last_replay(log + " operations, in 0.2 s\n") == (3, 0.2)
    assert last_replay("ready") == (0, 0.0)


def test_the_difference_is_that_of_the_means() -> None:
    compared = recovery_steps.Compared("full", "1 x 16", [1.0] * 4, [1, 1, 1, 1.4], 9, 1, 2, 0)
    cells = dict(zip(recovery_steps.COLUMNS, compared.cells(), strict=True))
    assert (cells["difference %"], cells["median %"]) == (10.0, 0.0)
    assert [each.met for each in recovery_steps.targets([compared])] == [False]


async def test_the_database_of_the_server_without_recovery_does_not_flush(tmp_path: Path) -> None:
    levels = []
    for connector in ({}, {"connector": WithoutFlush()}):
        database = await Database.open(tmp_path, **connector)
        rows = await database._writer.execute_fetchall("PRAGMA synchronous")
        levels.append(next(iter(rows))[0])
        await database.close()
    assert levels == [2, 1]  # SQLite's numbers of FULL and NORMAL


def test_a_bug_is_found_and_the_code_without_it_passes() -> None:
    rows, (failed, _) = recovery_proofs.simulate(0.5, 0.0)
    assert (rows[0][0], rows[0][3], failed.met) == ("as it is", 0, True)
    assert len(rows) == 1 + len(recovery_proofs.PLANTED)
    assert recovery_proofs.find("commit without flush", 60)[-1] == "found"


def test_a_table_of_another_program_becomes_a_result(tmp_path: Path) -> None:
    table = {"columns": ["sdk", "kills"], "rows": [["tinker", 12]]}
    (tmp_path / "kills.json").write_text(json.dumps(table))
    options = ["--part", "kills", "--from", str(tmp_path / "kills.json")]
    assert recovery.main([*options, "--json", str(tmp_path / "result.json")]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["columns"], result["rows"]) == (table["columns"], table["rows"])


def test_kills_without_their_table_are_refused() -> None:
    with pytest.raises(SystemExit):
        recovery.main(["--part", "kills"])


def test_a_flush_costs_something_or_nothing(tmp_path: Path) -> None:
    assert abs(recovery_steps.flush_cost_s(tmp_path, 1000, num_commits=3)) < 1.0


@pytest.mark.parametrize("mode", ["on", "off"])
async def test_only_the_server_with_recovery_has_a_journal(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_http, "MODEL", "tiny")
    folder = await asyncio.to_thread(write_tiny_model, tmp_path / "model")
    flags = ("--model", f"tiny={folder}", "--dtype", "float32")
    off = {"environment": {MODE: "off"}, "module": MODULE} if mode == "off" else {}
    with running(Server(flags, tmp_path / "data", **off)) as server:
        model = await training_http.TrainedModel.create(server, 4)
        assert await model.step(1, 4) > 0
        assert "tinkercloud_snapshots" in await model.metrics()
        await model.close()
        num_bytes = recovery_steps.journal_bytes(tmp_path / "data")
        path = tmp_path / "data" / "tinkercloud.db"
        with closing(sqlite3.connect(path)) as database:
            (num_kept,) = database.execute("SELECT count(*) FROM operations").fetchone()
    assert num_kept == (3 if mode == "on" else 0)
    assert (num_bytes > 0) == (mode == "on")
