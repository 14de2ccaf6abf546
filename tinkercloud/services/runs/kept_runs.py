"""Runs as the data folder has them: which operations and steps are kept, and where to begin."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from tinkercloud.errors import UserError
from tinkercloud.services.recovery.recovery_files import RecoveryFiles
from tinkercloud.storage.archive import ArchiveStorage, Run
from tinkercloud.storage.database import Database
from tinkercloud.storage.futures import FuturesStorage, Sampled
from tinkercloud.storage.journal import JournalStorage, RanOperation, Snapshot
from tinkercloud.storage.metadata import MetadataStorage, Model, Sampler

RECORD_S = 1.0
"""Published weights may be sampled so long before their operation is on record."""


@dataclass(frozen=True, slots=True)
class KeptRun:
    """A run that can be replayed. snapshots: oldest first. classes: (position, class of numerics
    that computed what ran after it)."""

    run: Run
    model: Model
    snapshots: tuple[Snapshot, ...]
    classes: tuple[tuple[int, str], ...]

    @property
    def beginning(self) -> Snapshot | None:
        """What a replay of all that is kept begins with; None: with the model's creation."""
        return None if self.run.first == 1 else self.snapshots[0]

    @property
    def steps(self) -> tuple[int, int]:
        """The numbers of the first and the last step that are kept; the last is the smaller one
        where none is."""
        before = 0 if self.beginning is None else self.beginning.num_steps
        return before + 1, before + self.run.num_steps

    def nearest(self, position: int) -> Snapshot | None:
        """The newest snapshot at or before a position; None: the model's creation is nearest."""
        there = [each for each in self.snapshots if each.position <= position]
        return there[-1] if there else None

    def numerics(self, position: int) -> str:
        """The class that computed an operation; "": not on record."""
        earlier = [name for after, name in self.classes if after < position]
        return earlier[-1] if earlier else ""

    def __str__(self) -> str:
        first, last = self.steps
        steps = f"steps {first} to {last}" if last >= first else "no step"
        since = self.run.inexact_since
        exact = "" if since is None else f"; not bit-exact since step {since}"
        return (
            f"operations {self.run.first} to {self.run.last} of the run {self.run.model_id} are "
            f"kept, {steps}{exact}"
        )


class KeptRuns:
    def __init__(self, database: Database, data_dir: Path):
        self._archive = ArchiveStorage(database)
        self._journal = JournalStorage(database)
        self._futures = FuturesStorage(database)
        self.metadata = MetadataStorage(database)
        self.files = RecoveryFiles(data_dir)

    async def find(self, model_id: str) -> KeptRun:
        """Raises UserError."""
        run = await self._archive.run(model_id)
        if run is None:
            names = [each.model_id for each in await self._archive.runs()][-5:]
            raise UserError(
                f"nothing is kept of a run {model_id!r}; the newest that are kept: "
                f"{', '.join(names) or 'none'}. A run is named by its model's id; how long runs "
                "are kept is set by archive_days and archive_bytes"
            )
        model = await self.metadata.model(model_id, run.user)
        if model is None:
            raise UserError(f"the run {model_id!r} has operations, but no model on record")
        snapshots = await self._journal.snapshots(run.user, model_id)
        classes = await self._archive.numerics(model_id)
        return KeptRun(run, model, tuple(snapshots), tuple(classes))

    async def position_of_step(self, kept: KeptRun, step: int) -> int:
        """Raises UserError where that step is not kept."""
        first, last = kept.steps
        if first <= step <= last:
            before = 0 if kept.beginning is None else kept.beginning.position
            position = await self._archive.position_of_step(
                kept.run.model_id, step - first + 1, before
            )
            if position is not None:
                return position
        raise UserError(f"step {step} is not kept: {kept}")

    async def operations(
        self, kept: KeptRun, after: int, until: int
    ) -> AsyncIterator[RanOperation]:
        """Those at positions after `after` and up to `until`, in order."""
        run, position = kept.run, after
        while operation := await self._journal.next_after(run.user, run.model_id, position):
            if operation.position > until:
                return
            yield operation
            position = operation.position

    async def operation(self, request_id: str) -> RanOperation | None:
        return await self._archive.operation(request_id)

    async def inflight(self, sampled: Sampled, model_id: str) -> list[RanOperation]:
        """What published the weights that a sample of an inflight sampler may have read, the newest
        first."""
        ended = sampled.finished_at + RECORD_S
        return await self._archive.inflight_publications(model_id, sampled.started_at, ended)

    async def result(self, operation: RanOperation) -> bytes | None:
        """As its client got it; None where it has expired."""
        return await self._journal.result(operation)

    async def sample(self, sampler_id: str, seq_id: int) -> Sampled | None:
        """A sample of a sampling session; None: it is not kept, or did not succeed."""
        return await self._futures.sample(sampler_id, seq_id)

    async def sampler(self, sampled: Sampled) -> Sampler:
        """Raises UserError."""
        sampler = await self.metadata.sampler(sampled.sampler_id, sampled.user)
        if sampler is None:
            raise UserError(f"the sampling session {sampled.sampler_id} is not kept any more")
        return sampler
