"""The recovery benchmark's figures, and the servers that it compares."""

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import recovery_kills, recovery_simulation, recovery_steps
from benchmarks.lib import training_http
from benchmarks.lib.recovery_server import MODE, MODULE, WithoutFlush
from benchmarks.recovery_restart import Restart, last_replay, targets
from tests.e2e.killer import Killed
from tests.e2e.kills import Result
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


def test_a_snapshot_pays_for_the_computing_until_the_next_one() -> None:
    """Steps of a second, of which two of 1.5 had a snapshot beside them: 1 s of extra time, for
    snapshots that took 3 s and so are due every 100."""
    compared = recovery_steps.Compared(
        *("full", "1 x 16", [1.0] * 4, [1.0, 1.01, 1.01], [1.51, 1.51], 9.0),
        num_snapshots=1,
        snapshot_bytes=2e6,
        snapshot_s=3.0,
        flush_s=0.0,
    )
    cells = dict(zip(recovery_steps.COLUMNS, compared.cells(), strict=True))
    assert cells["journal %"] == 1.0
    assert (cells["extra s each"], cells["due every s"], cells["snapshots %"]) == (1.0, 100.0, 1.0)
    assert (cells["both %"], cells["steps"], cells["MB each"]) == (2.0, 5, 2.0)
    assert replace(compared, without_s=[2.0]).percent == compared.snapshots_percent
    worse = replace(compared, beside_s=[1.51, 2.66])
    assert [each.met for each in recovery_steps.targets([compared, worse])] == [True, False]


async def test_the_database_of_the_server_without_recovery_does_not_flush(tmp_path: Path) -> None:
    levels = []
    for connector in ({}, {"connector": WithoutFlush()}):
        database = await Database.open(tmp_path, **connector)
        rows = await database._writer.execute_fetchall("PRAGMA synchronous")
        levels.append(next(iter(rows))[0])
        await database.close()
    assert levels == [2, 1]  # SQLite's numbers of FULL and NORMAL


@pytest.mark.slow
def test_a_bug_is_found_and_the_code_without_it_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    two = dict(list(recovery_simulation.PLANTED.items())[:2])
    monkeypatch.setattr(recovery_simulation, "PLANTED", two)
    rows, (failed,) = recovery_simulation.simulate(0.5)
    assert (rows[0][0] > 0, rows[0][2], failed.met) == (True, 0, True)
    rows, (found,) = recovery_simulation.find_planted(0.0)
    assert (len(rows), found.target) == (2, ">= 2")
    assert recovery_simulation.find("commit without flush", 60)[-1] == "found"


def test_kills_of_one_kind_are_a_row() -> None:
    snapshot = Killed("snapshot", "server", "SIGKILL", 1.0, 2, 1, "half", 3.5)
    killed = [snapshot, replace(snapshot, down_s=4.0), replace(snapshot, target="engine", down_s=0)]
    result = Result("tinker", "sft", 9.0, killed, 0, [])
    assert recovery_kills.rows([result]) == [
        ("tinker, sft", "engine, SIGKILL", "snapshot", 1, 3, "-"),
        ("tinker, sft", "server, SIGKILL", "snapshot", 2, 6, 4.0),
    ]
    worse = replace(result, differences=["step 3, loss"], missing=1)
    assert [each.met for each in recovery_kills.targets([result], 3)] == [True, True, True]
    assert [each.met for each in recovery_kills.targets([result], 4)] == [True, True, False]
    missed = recovery_kills.targets([result, worse], 6)
    assert [each.met for each in missed[:2]] == [False, False]


def test_a_flush_costs_something_or_nothing(tmp_path: Path) -> None:
    assert abs(recovery_steps.flush_cost_s(tmp_path, 1000, num_commits=3)) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["on", "off"])
async def test_only_the_server_with_recovery_has_a_journal(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_http, "MODEL", "tiny")
    folder = await asyncio.to_thread(write_tiny_model, tmp_path / "model")
    flags = ("--model", f"tiny={folder}", "--dtype", "float32")
    off = {"environment": {MODE: "off"}, "module": MODULE} if mode == "off" else {}
    with running(Server(flags, tmp_path / "data", **off)) as server:
        loop = await recovery_steps.warm_loop(server, 4, (1, 4))
        model = loop.model
        await loop.run(1, 4, 0.0)
        while not loop.seconds:
            await loop.run(1, 4, 0.01)
        assert min(loop.seconds) > 0
        await model.close()
        num_bytes = recovery_steps.journal_bytes(tmp_path / "data")
        path = tmp_path / "data" / "tinkercloud.db"
        with closing(sqlite3.connect(path)) as database:
            (num_kept,) = database.execute("SELECT count(*) FROM operations").fetchone()
    assert (num_kept > 0) == (mode == "on")
    assert (num_bytes > 0) == (mode == "on")
