"""What must hold of runs that are kept for replays: each gives the bits on record again."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from tests.simulation.engine import SmallFakeBackend
from tinkercloud.services.common.catalog import Catalog
from tinkercloud.services.runs.kept_runs import KeptRuns
from tinkercloud.services.runs.replay import RunReplay
from tinkercloud.storage.archive import ArchiveStorage

if TYPE_CHECKING:
    from tests.simulation.world import World


async def runs_give_the_same_again(world: "World") -> AsyncIterator[str]:
    """Raises what reading raises."""
    assert world.server is not None
    database = world.server.services.database
    kept_runs = KeptRuns(database, world.disk.folder)
    for run in await ArchiveStorage(database).runs():
        kept = await kept_runs.find(run.model_id)
        backend = SmallFakeBackend()
        catalog = Catalog(await backend.start())
        replay = RunReplay(backend, catalog, kept_runs)
        async for repeated in replay.repeat(kept, kept.beginning, kept.run.last):
            if not repeated.agrees:
                operation = repeated.operation
                yield f"{operation.kind} {operation.position} of {run.model_id} gives other bits"
