"""What the invariants let pass, and what they do not."""

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.simulation.engine import SimulatedEngine
from tests.simulation.invariants import PUT_AWAY_S, nothing_is_left_over
from tests.simulation.loop import SimulatedLoop
from tests.simulation.schedule import BASES
from tinkercloud.core.types import FromBase
from tinkercloud.services.recovery.version_store import VersionStore

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
