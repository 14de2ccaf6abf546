"""What must hold of runs that are kept for replays: each gives the bits on record again."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests.simulation.engine import SmallFakeBackend
from tinkercloud.errors import UserError
from tinkercloud.services.common.catalog import Catalog
from tinkercloud.services.runs.kept_runs import KeptRuns
from tinkercloud.services.runs.replay import RunReplay
from tinkercloud.storage.archive import ArchiveStorage, Run
from tinkercloud.storage.database import Database

if TYPE_CHECKING:
    from tests.simulation.world import World


async def runs_give_the_same_again(world: "World") -> AsyncIterator[str]:
    """Raises what reading raises."""
    assert world.server is not None
    database = world.server.services.database
    archive = ArchiveStorage(database)
    for run in await archive.runs():
        kept: Run | None = run
        while kept is not None:
            try:
                async for wrong in _differences(database, world.disk.folder, kept):
                    yield wrong
                break
            except UserError:  # the server works on: a new snapshot may have cut the run
                now = await archive.run(run.model_id)
                if now == kept:
                    raise
                kept = now


async def _differences(database: Database, folder: Path, run: Run) -> AsyncIterator[str]:
    kept_runs = KeptRuns(database, folder)
    kept = await kept_runs.find(run.model_id)
    backend = SmallFakeBackend()
    catalog = Catalog(await backend.start())
    replay = RunReplay(backend, catalog, kept_runs)
    async for repeated in replay.repeat(kept, kept.beginning, kept.run.last):
        if not repeated.agrees:
            operation = repeated.operation
            yield f"{operation.kind} {operation.position} of {run.model_id} gives other bits"
