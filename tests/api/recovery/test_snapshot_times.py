"""How often a model's snapshots are taken: by what one of them cost."""

import asyncio
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path

import pytest

from tests.api.harness import Api, serving
from tests.api.recovery.test_recovery import train
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config
from tinkercloud.core.types import StateCost
from tinkercloud.errors import StateCopyLost
from tinkercloud.services.checkpoints import checkpoint_files
from tinkercloud.services.recovery.snapshots import FIRST_COST_S, SHARE


class Costly(FakeBackend):
    """Copies and writes take as long as on a large model and a slow disk, by its word."""

    def __init__(self, copy_s: float) -> None:
        super().__init__(Config(backend="fake"))
        self._copy_s = copy_s

    async def write_state(self, copy: int, directory: Path) -> StateCost:
        return replace(await super().write_state(copy, directory), copy_s=self._copy_s)


async def computing_until_one(api: Api, model_id: str, position: int) -> int:
    """Operations of a second each."""
    snapshots = api.services.snapshots
    before = snapshots.stats()["snapshots"]
    for num_seconds in range(1, 10_000):
        await snapshots.ended(("ann", model_id), position + num_seconds, 1.0)
        await snapshots.settled()
        if snapshots.stats()["snapshots"] > before:
            return num_seconds
    raise AssertionError


class Lost(FakeBackend):
    """Copies are gone before they are written, which takes write_s."""

    def __init__(self, write_s: float) -> None:
        super().__init__(Config(backend="fake"))
        self._write_s = write_s
        self.num_copies = 0

    async def copy_state(self, model_id: str) -> int:
        self.num_copies += 1
        return await super().copy_state(model_id)

    async def write_state(self, copy: int, directory: Path) -> StateCost:
        await asyncio.sleep(self._write_s)
        raise StateCopyLost(copy)


async def test_a_snapshot_that_was_given_up_is_tried_as_seldom_as_one_that_was_taken(
    tmp_path: Path,
) -> None:
    """As where the memory has no room for copies, and each operation ends the one underway."""
    backend = Lost(write_s=0.3)
    async with serving(tmp_path, backend=backend) as api:
        model_id = await api.model()
        number = await train(api, model_id, 1, steps=1)
        before, num_seconds = backend.num_copies, 100
        for second in range(num_seconds):
            await api.services.snapshots.ended(("ann", model_id), number + second, 1.0)
            await api.services.snapshots.settled()
        # One that costs 0.3 s is due after 10 s, and after 10 s again where it failed.
        assert api.services.snapshots.stats()["replay_debt_seconds"] >= num_seconds
        assert 1 <= backend.num_copies - before <= num_seconds * SHARE / 0.3 + 1


async def test_a_copy_whose_folder_cannot_be_made_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that rests has no next copy, which would replace it in the engine's memory."""

    def full(parent: Path) -> Path:
        raise OSError(ENOSPC, "No space left on device")

    backend = FakeBackend(Config(backend="fake"))
    async with serving(tmp_path, backend=backend) as api:
        model_id = await api.model()
        number = await train(api, model_id, 1, steps=1)
        await api.services.snapshots.settled()
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_files, "new_temporary", full)
            await api.services.snapshots.ended(("ann", model_id), number, 1e3)
            await api.services.snapshots.settled()
        assert api.services.snapshots.stats()["replay_debt_seconds"] >= 1e3
        assert not backend._copies
        await api.services.snapshots.ended(("ann", model_id), number, 1e6)
        await api.services.snapshots.settled()
        assert api.services.snapshots.stats()["replay_debt_seconds"] == 0


@pytest.mark.parametrize("copy_s", [0.6, 6.0])
async def test_a_snapshot_is_due_when_it_costs_three_percent_of_the_computing_since_the_last(
    tmp_path: Path, copy_s: float
) -> None:
    async with serving(tmp_path, backend=Costly(copy_s)) as api:
        model_id = await api.model()
        number = await train(api, model_id, 1, steps=1)
        first_s = await computing_until_one(api, model_id, number)
        assert first_s == pytest.approx(FIRST_COST_S / SHARE, abs=1.0)
        took_s = api.services.snapshots.stats()["snapshot_seconds"]  # with writing
        next_s = await computing_until_one(api, model_id, number + 100)
        assert took_s >= copy_s
        assert next_s == pytest.approx(took_s / SHARE, abs=1.0)
