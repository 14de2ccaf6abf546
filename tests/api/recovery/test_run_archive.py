"""What is kept of runs for replays, and for how long."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Api, serving
from tests.api.recovery.test_recovery import train
from tinkercloud.services.recovery import run_archive, snapshots
from tinkercloud.services.recovery.run_archive import superfluous
from tinkercloud.services.runs.kept_runs import KeptRun, KeptRuns
from tinkercloud.storage.journal import Snapshot

EVERY_S = 600.0


@pytest.fixture(autouse=True)
def a_snapshot_after_each_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "SHARE", 1e9)


async def kept_of(api: Api, folder: Path, model_id: str) -> KeptRun:
    await api.services.snapshots.settled()
    return await KeptRuns(api.services.database, folder).find(model_id)


def snapshot_folders(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "recovery").glob("*/snapshot-*"))


@pytest.mark.parametrize("computed_s", [list(range(0, 3000, 7)), list(range(0, 9000, 500))])
def test_snapshots_are_thinned_as_they_come(computed_s: list[int]) -> None:
    """At any time the way from one to the next is short, and no two could do without the one
    between them."""
    kept: list[Snapshot] = []
    for position, seconds in enumerate(computed_s):
        kept.append(Snapshot("m", "u", position, f"s{position}", 1, 0, float(seconds)))
        gone = superfluous(kept)
        kept = [each for each in kept if each.position not in gone]
        ways = [0.0, *(each.computed_s for each in kept)]
        longest = max(b - a for a, b in pairwise(ways))
        assert longest <= EVERY_S
        assert all(c - a > EVERY_S for a, c in zip(ways[:-1], ways[2:-1], strict=False) if a)
    assert kept[-1].computed_s == computed_s[-1]


async def test_operations_outlive_snapshots_and_their_model(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        session = await api.session()
        model_id = await api.model(session)
        await train(api, model_id, 1, steps=3)
        kept = await kept_of(api, tmp_path, model_id)
        # created, then three times two passes and a step
        assert (kept.run.first, kept.run.last, kept.steps) == (1, 10, (1, 3))
        assert len(snapshot_folders(tmp_path)) == len(kept.snapshots) == 1
        await api.ok(f"sessions/{session}/finish", reason={"type": "success"}, detail=None)
        await api.services.models.freed()
        kept = await kept_of(api, tmp_path, model_id)
        assert (kept.run.num_operations, kept.run.ended_at is None) == (10, False)
        assert not list((tmp_path / "recovery").glob("*/version-*"))
    async with serving(tmp_path) as api:  # it is no model to bring back
        assert api.services.recovery.positions == {}
        assert (await kept_of(api, tmp_path, model_id)).run.num_operations == 10


Change = Callable[[Api], Any]


def made_older(days: float) -> Change:
    return lambda api: api.services.database.write(
        "UPDATE operations SET ran_at = ran_at - ?", days * 86400.0
    )


async def made_larger(api: Api) -> None:
    await api.services.database.write("UPDATE snapshots SET num_bytes = 1 << 40")


@pytest.mark.parametrize(
    ("change", "is_kept"), [(made_older(29), True), (made_older(31), False), (made_larger, False)]
)
async def test_what_is_too_old_or_too_much_goes(
    tmp_path: Path, change: Change, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_archive, "SNAPSHOT_EVERY_S", 0.0)  # each one is kept
    async with serving(tmp_path) as api:
        session = await api.session()
        live = await api.model()
        ended = await api.model(session)
        for model_id in (live, ended):
            await train(api, model_id, 1, steps=2)
        before = await kept_of(api, tmp_path, live)
        await kept_of(api, tmp_path, ended)
        await api.ok(f"sessions/{session}/finish", reason={"type": "success"}, detail=None)
        await api.services.models.freed()
        assert len(before.snapshots) > 1
        await change(api)
        await api.services.archive.expire()
        rows = await api.services.database.all("SELECT model_id, position FROM operations")
        assert any(row["model_id"] == ended for row in rows) is is_kept
        newest = before.snapshots[-1]
        assert any(r["model_id"] == live and r["position"] <= newest.position for r in rows) is (
            is_kept
        )
        assert newest.directory.rpartition("/")[2] in snapshot_folders(tmp_path)
        assert (len(snapshot_folders(tmp_path)) > 1) is is_kept
    async with serving(tmp_path) as api:  # the live one comes back all the same
        await train(api, live, 7, steps=1)


async def test_a_run_that_is_cut_says_which_steps_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_archive, "SNAPSHOT_EVERY_S", 0.0)
    async with serving(tmp_path) as api:
        model_id = await api.model()
        number = 1
        for _ in range(3):
            number = await train(api, model_id, number, steps=1)
            await api.services.snapshots.settled()
            await api.services.snapshots.take(("ann", model_id), number)  # number 0 was position 1
        kept = await kept_of(api, tmp_path, model_id)
        after_two = next(s for s in kept.snapshots if s.num_steps == 2)
        await api.services.database.write(
            "UPDATE operations SET ran_at = 0 WHERE position <= ?", after_two.position
        )
        await api.services.archive.expire()
        kept = await kept_of(api, tmp_path, model_id)
        assert kept.beginning is not None
        assert kept.beginning.num_steps == 2
        assert kept.steps == (3, 3)
        assert "steps 3 to 3" in str(kept)
