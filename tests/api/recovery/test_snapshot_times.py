"""How often a model's snapshots are taken: by what one of them cost."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.api.harness import Api, serving
from tests.api.recovery.test_recovery import train
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config
from tinkercloud.core.types import StateCost
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
