"""What the invariants let pass, and what they do not."""

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.simulation.commands import CommandRun, Commands, Surroundings
from tests.simulation.engine import SimulatedEngine
from tests.simulation.invariants import PUT_AWAY_S, files_are_whole, nothing_is_left_over
from tests.simulation.loop import SimulatedLoop
from tests.simulation.schedule import BASES, Command
from tinkercloud.core.types import FromBase
from tinkercloud.errors import StorageFailed
from tinkercloud.services.recovery.version_store import VersionStore
from tinkercloud.storage.database import Database
from tinkercloud.storage.metadata import LoraRecord, MetadataStorage, Model

MAX_STEPS = 10_000


class Slow(random.Random):
    """Everything takes longer than what is put away is waited for."""

    def expovariate(self, lambd: float = 1.0) -> float:
        return 2 * PUT_AWAY_S


def left_over(*, is_released: bool, folder: Path) -> list[str]:
    """Of a version that nobody can sample: whether its release is on its way to a slow engine."""
    loop, found = SimulatedLoop(random.Random(1)), list[str]()
    engine = SimulatedEngine(loop, Slow(), lambda number: "slow", lambda *event: None, 1.0)
    versions = VersionStore(engine)
    sampling = SimpleNamespace(_versions=SimpleNamespace(_versions=versions))
    world: Any = SimpleNamespace(
        disk=SimpleNamespace(folder=folder),
        server=SimpleNamespace(services=SimpleNamespace(sampling=sampling)),
        engine=engine,
    )

    async def look() -> None:
        await engine.start()
        version = await engine.publish(FromBase(BASES[0]))
        if is_released:
            await versions.put("key", version, ("ann", "m"))
            leaving = asyncio.create_task(versions.leave("key", "ann"))
            await asyncio.sleep(1.0)
        found.extend([text async for text in nothing_is_left_over(world)])
        if is_released:
            await leaving

    loop.run(look(), MAX_STEPS)
    return found


def test_what_a_slow_engine_is_told_to_free_is_not_left_over(tmp_path: Path) -> None:
    assert left_over(is_released=True, folder=tmp_path) == []


def test_a_version_that_is_never_released_is_left_over(tmp_path: Path) -> None:
    [text] = left_over(is_released=False, folder=tmp_path)
    assert "is left, and nothing needs it" in text


async def test_only_commands_that_were_cut_short_may_leave_files(tmp_path: Path) -> None:
    database = await Database.open(tmp_path)
    metadata = MetadataStorage(database)
    lora = LoraRecord(4, 0, True, True, True)
    for model_id, about in (("server's", {}), ("branch", {"branch_of": "server's"})):
        await metadata.put_model(Model(model_id, "ann", "s", "base", lora, about, 1.0, 1.0, "live"))
    await database.close()
    of_server, *of_commands = (
        *("checkpoints/server's/weights/a/.tmp-1", "checkpoints/branch/weights/step-2/0123"),
        "checkpoints/not known yet/weights/step-2/.tmp-2",
    )
    for directory in (of_server, *of_commands):
        (tmp_path / directory).mkdir(parents=True)

    def wrong(*, may_have_left_files: bool) -> set[str]:
        left = SimpleNamespace(may_have_left_files=may_have_left_files)
        world: Any = SimpleNamespace(disk=SimpleNamespace(folder=tmp_path), commands=left)
        return {text.removesuffix(" belongs to nothing") for text in files_are_whole(world)}

    assert wrong(may_have_left_files=True) == {of_server}
    assert wrong(may_have_left_files=False) == {of_server, *of_commands}


def test_a_command_that_the_disk_refuses_may_have_left_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(self: CommandRun, database: Database) -> None:
        raise StorageFailed("database or disk is full")

    monkeypatch.setattr(CommandRun, "_do", refused)
    loop, failures = SimulatedLoop(random.Random(1)), list[str]()
    around = Surroundings(loop, lambda: 0.0, tmp_path, list, failures.append)
    commands = Commands(around, lambda process: None)

    async def ended() -> None:
        commands.begin(Command("branch", 0.0, 1), tmp_path)
        while not commands.are_done:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.1)

    loop.run(ended(), MAX_STEPS)
    assert not failures
    assert commands.may_have_left_files
    commands.end()  # another server begins
    assert not commands.may_have_left_files
