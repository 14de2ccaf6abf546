"""What is kept of runs to be replayed: all operations, and a snapshot now and then.

A crash needs a model's newest snapshot and the operations after it. What is older is kept here for
the configured time and bytes, also of models that are no more; the oldest goes first, up to the
next snapshot, so that what is left can be replayed from its beginning.
"""

import logging
import time
from collections.abc import Sequence
from itertools import pairwise

from tinkercloud.services.recovery.lane_operations import LOAD
from tinkercloud.services.recovery.recovery_files import RecoveryFiles
from tinkercloud.storage.archive import ArchiveStorage, Run
from tinkercloud.storage.journal import JournalStorage, Snapshot

logger = logging.getLogger(__name__)

SNAPSHOT_EVERY_S = 600.0
"""Of computing, between two snapshots that are kept: what reaching a step costs at most."""
DAY_S = 86400.0


class RunArchive:
    """days, max_bytes: how long, and in all, something is kept that no crash needs; 0: not."""

    def __init__(
        self,
        storage: ArchiveStorage,
        journal: JournalStorage,
        files: RecoveryFiles,
        *,
        days: float,
        max_bytes: int,
    ):
        self._storage = storage
        self._journal = journal
        self._files = files
        self._days = days
        self._max_bytes = max_bytes

    @property
    def keeps(self) -> bool:
        return self._days > 0 and self._max_bytes > 0

    async def has_snapshot(self, user: str, model_id: str) -> None:
        """A model has a new one: what the archive does not keep goes."""
        snapshots = await self._journal.snapshots(user, model_id)
        if self.keeps:
            await self._journal.drop_snapshots(user, model_id, superfluous(snapshots))
        else:
            await self._storage.cut(user, model_id, snapshots[-1].position)
        await self._remove_files(user, model_id)

    async def end_run(self, user: str, model_id: str) -> None:
        """A model is no more."""
        if self.keeps and await self._storage.run(model_id) is not None:
            await self._journal.end_run(user, model_id)
            await self._remove_files(user, model_id, versions=True)
        else:
            await self._drop(user, model_id)

    async def expire(self) -> None:
        """Remove what is too old, then what is too much."""
        runs = await self._storage.runs()
        before = time.time() - self._days * DAY_S
        for run in runs:
            while run is not None and run.oldest_at < before:
                run = await self._shortened(run, before)
        runs = await self._storage.runs()
        num_bytes = sum(run.num_bytes for run in runs)
        for run in runs:
            shorter: Run | None = run
            while shorter is not None and num_bytes > self._max_bytes:
                was, shorter = shorter.num_bytes, await self._shortened(shorter)
                num_bytes -= was - (0 if shorter is None else shorter.num_bytes)

    async def _shortened(self, run: Run, before: float = float("inf")) -> Run | None:
        """The run without its oldest piece, if all of that ran earlier than `before`; None where
        nothing more can go."""
        position = await self._storage.next_cut(run.model_id)
        if position is None:
            newest_at = await self._storage.newest_in(run.model_id, run.last)
            if run.ended_at is not None and newest_at is not None and newest_at < before:
                await self._drop(run.user, run.model_id)
            return None
        newest_at = await self._storage.newest_in(run.model_id, position)
        if newest_at is not None and newest_at >= before:
            return None
        await self._storage.cut(run.user, run.model_id, position)
        await self._remove_files(run.user, run.model_id)
        shorter = await self._storage.run(run.model_id)
        if shorter is None and run.ended_at is not None:
            await self._drop(run.user, run.model_id)
        return shorter

    async def _drop(self, user: str, model_id: str) -> None:
        await self._journal.forget(user, model_id)
        await self._files.remove(self._files.folder(model_id))
        logger.info("nothing is kept of the run %s any more", model_id)

    async def _remove_files(self, user: str, model_id: str, *, versions: bool = False) -> None:
        """What no row names. Loaded checkpoints are there before their operation has run, and have
        its request's id."""
        loads = await self._journal.operations(user, model_id, LOAD)
        needed = {f"loaded-{each}" for each in loads}
        for snapshot in await self._journal.snapshots(user, model_id):
            needed.add((self._files.data_dir / snapshot.directory).name)
        await self._files.remove_others(model_id, needed, versions=versions)


def superfluous(snapshots: Sequence[Snapshot]) -> list[int]:
    """Positions of those to remove. snapshots: of one model, oldest first; the newest one stays,
    and of the others as many as keep the way from one to the next short."""
    gone: list[int] = []
    kept_s = 0.0
    for snapshot, following in pairwise(snapshots):
        if following.computed_s - kept_s <= SNAPSHOT_EVERY_S:
            gone.append(snapshot.position)
        else:
            kept_s = snapshot.computed_s
    return gone
