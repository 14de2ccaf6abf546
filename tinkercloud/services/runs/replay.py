"""A run computed again, and held against what is on record of it."""

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tinkercloud.backends.base import Backend
from tinkercloud.services.common.catalog import Catalog
from tinkercloud.services.recovery.lane_operations import FORWARD_BACKWARD
from tinkercloud.services.recovery.replayer import Replayer
from tinkercloud.services.recovery.training_outcomes import deviation
from tinkercloud.services.runs.kept_runs import KeptRun, KeptRuns
from tinkercloud.storage.journal import STEP_KIND, RanOperation, Snapshot


@dataclass(frozen=True, slots=True)
class Repeated:
    """An operation that was done again. step: its number, of a step. agrees: whether it gave the
    bits on record. same_class: whether what computed it first computes the same bits as this
    machine. deviation: the largest difference of a log-probability, in nats; None: the first result
    is not kept, or has none."""

    operation: RanOperation
    computed: bytes
    step: int | None
    agrees: bool
    same_class: bool
    deviation: float | None = None


class RunReplay:
    """One run at a time, on a backend of its own."""

    def __init__(self, backend: Backend, catalog: Catalog, runs: KeptRuns):
        self._backend = backend
        self._catalog = catalog
        self._runs = runs
        self._replayer = Replayer(backend)

    async def restore(self, kept: KeptRun, snapshot: Snapshot) -> None:
        """The model as the snapshot has it. Raises StateDamaged."""
        directory = self._runs.files.data_dir / snapshot.directory
        base_model = self._base_model(kept)
        await self._backend.restore_state(kept.run.model_id, base_model, directory)

    async def repeat(
        self, kept: KeptRun, beginning: Snapshot | None, until: int
    ) -> AsyncIterator[Repeated]:
        """Each operation up to a position, from a snapshot (None: the model's creation)."""
        after, step = 0, 0
        if beginning is not None:
            await self.restore(kept, beginning)
            after, step = beginning.position, beginning.num_steps
        async for repeated in self.go_on(kept, after, until, step):
            yield repeated

    async def go_on(
        self, kept: KeptRun, after: int, until: int, step: int
    ) -> AsyncIterator[Repeated]:
        """The same of a model that is as it was after its operation at `after`, and so many
        steps."""
        async for operation in self._runs.operations(kept, after, until):
            step += operation.kind == STEP_KIND
            yield await self._repeated(kept, operation, step)

    async def _repeated(self, kept: KeptRun, operation: RanOperation, step: int) -> Repeated:
        loaded = self._runs.files.loaded(operation.model_id, operation.request_id)
        computed = await self._replayer.do(operation, self._base_model(kept), loaded)
        agrees = operation.digest in (None, hashlib.sha256(computed).digest())
        return Repeated(
            operation,
            computed,
            step if operation.kind == STEP_KIND else None,
            agrees,
            kept.numerics(operation.position) == self._backend.numerics(),
            None if agrees else await self._deviation(operation, computed),
        )

    async def _deviation(self, operation: RanOperation, computed: bytes) -> float | None:
        first = await self._runs.result(operation)
        if first is None or operation.kind != FORWARD_BACKWARD:
            return None
        return deviation(first, computed)

    def _base_model(self, kept: KeptRun) -> str:
        return self._catalog.backend_name(kept.model.base_model)


@dataclass(slots=True)
class Verdict:
    """Over operations that were done again. cannot_compare: of those that differ, those that
    another class of numerics computed first."""

    num_operations: int = 0
    num_different: int = 0
    cannot_compare: int = 0
    deviation: float = 0.0

    def add(self, repeated: Repeated) -> None:
        self.num_operations += 1
        if not repeated.agrees:
            self.num_different += 1
            self.cannot_compare += not repeated.same_class
            self.deviation = max(self.deviation, repeated.deviation or 0.0)

    def __str__(self) -> str:
        if not self.num_different:
            return f"all {self.num_operations} operations gave the bits on record"
        text = f"{self.num_different} of {self.num_operations} operations gave other bits"
        if self.cannot_compare == self.num_different:
            text += "; cannot check bits: another class of numerics computed them first"
        elif self.cannot_compare:
            text += f", {self.cannot_compare} of them where bits cannot be checked"
        return f"{text}; largest difference of a log-probability: {self.deviation:.3g} nats"
