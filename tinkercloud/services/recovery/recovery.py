"""Models over crashes: what a backend has lost comes back from snapshots and journals.

Where the memory of the backend began anew, the first operation of a model (or the first sample of
weights that it published) waits until its last snapshot is restored and the operations after it
are done again, in their order. Outcomes that were given stay as they are; what is computed again is
compared with them.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

from tinkercloud.backends.base import Backend
from tinkercloud.core.lanes import Lanes
from tinkercloud.core.pending import Work
from tinkercloud.errors import (
    EngineDied,
    MemoryShort,
    ModelNotFound,
    ModelStateLost,
    ServerFault,
    StateDamaged,
    TinkercloudError,
    UserError,
)
from tinkercloud.services.common.catalog import Catalog
from tinkercloud.services.recovery.lane_operations import FORWARD_BACKWARD, PUBLISH
from tinkercloud.services.recovery.replayer import Replayer
from tinkercloud.services.recovery.returns import READS_SNAPSHOT, CannotComeBack, Return, Returns
from tinkercloud.services.recovery.snapshots import Key, Snapshots
from tinkercloud.services.recovery.training_outcomes import deviation
from tinkercloud.services.recovery.version_store import Published
from tinkercloud.storage.futures import Outcome, Ticket
from tinkercloud.storage.journal import JournalStorage, RanOperation, Snapshot
from tinkercloud.storage.metadata import MetadataStorage

logger = logging.getLogger(__name__)

Publish = Callable[[RanOperation], Awaitable[None]]
MAX_ATTEMPTS = 3
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 30.0
"""Between attempts to bring a model back; each wait is twice the one before."""
MAX_FAILURES = 12
"""Of bringing a model back, without an end of the engine: what is short of memory for minutes."""


FIRST_POSITION = 1
"""Of the operation that makes a model."""


class Recovery:
    """What lanes call to keep models recoverable (`core.lanes.RecoveryHooks`)."""

    def __init__(
        self,
        backend: Backend,
        catalog: Catalog,
        metadata: MetadataStorage,
        journal: JournalStorage,
        snapshots: Snapshots,
    ):
        self._backend = backend
        self._catalog = catalog
        self._metadata = metadata
        self._journal = journal
        self._snapshots = snapshots
        self._files = snapshots.files
        self._replayer = Replayer(backend)
        self._there: dict[Key, int] = {}  # the beginning of the backend's memory that has the model
        self._positions: dict[Key, int] = {}  # of what ran last, of models that are there
        self._used_at: dict[Key, float] = {}  # monotonic, of the same
        self._suspects = asyncio.Lock()
        self._returns = Returns()
        self._deviation = 0.0
        self._num_recovered = 0
        self.recorded: Callable[[], Awaitable[None]] = _nothing_is_late
        """Waits until every outcome is on record (`OutcomeRecorder.recorded`)."""
        self.publish_again: Publish = _nothing_to_publish
        """Publishes what an operation published, from its model as it was then."""

    @property
    def is_offered(self) -> bool:
        """Whether this backend's models come back."""
        return self._backend.incarnation() is not None

    @property
    def positions(self) -> dict[Key, int]:
        """Of models in the backend's memory: the position of the last operation."""
        now = self._backend.incarnation()
        return {key: p for key, p in self._positions.items() if self._there.get(key) == now}

    # called by lanes

    async def run(self, ticket: Ticket, work: Work) -> Outcome:
        """Over again where the engine ended underway. From then on alone with others that were
        underway: what ends the engine each time is found so, and the rest goes on."""
        assert ticket.model_id is not None
        key = ticket.user, ticket.model_id
        outcome = await self._attempt(key, work, 1)
        if outcome is not None:
            return outcome
        async with self._suspects:
            for attempt in range(2, MAX_ATTEMPTS + 1):
                outcome = await self._attempt(key, work, attempt)
                if outcome is not None:
                    return outcome
        left = "There is no such model" if ticket.creates_model else "The model is as it was before"
        raise EngineDied(
            f"the engine process ended each of the {MAX_ATTEMPTS} times that this {ticket.kind} "
            "was tried, and it is not tried again: send less at once, and see the server's log for "
            f"the reason. {left}"
        )

    async def _attempt(self, key: Key, work: Work, attempt: int) -> Outcome | None:
        """None: the engine ended underway."""
        while True:
            await self._bring_back(key, alone=attempt > 1)
            began = self._backend.incarnation()
            try:
                return await work()
            except EngineDied as error:
                if not self.is_offered:
                    raise
                logger.warning("attempt %d of an operation of %s: %s", attempt, key[1], error)
                return None
            except ModelStateLost:
                # Of another engine than had the model: that one ended before the operation reached
                # it, so this was no attempt.
                if self._backend.incarnation() == began:
                    if await self._is_deleted(key):  # once this was acknowledged
                        raise ModelNotFound(key[1]) from None
                    raise

    async def _is_deleted(self, key: Key) -> bool:
        user, model_id = key
        model = await self._metadata.model(model_id, user)
        return model is None or model.state != "live"

    async def ended(self, ticket: Ticket, position: int, took_s: float) -> None:
        assert ticket.model_id is not None
        key = ticket.user, ticket.model_id
        if not (self.is_offered and self._is_there(key)):
            return  # perhaps half of it: a snapshot now would be of no state that it ever had
        self._positions[key], self._used_at[key] = position, time.monotonic()
        await self._snapshots.ended(key, position, took_s)

    def unrecorded(self, ticket: Ticket) -> None:
        """The model may have an operation that the journal has not: there is no position to take a
        snapshot at, as the operation would be done again after it."""
        assert ticket.model_id is not None
        self._positions.pop((ticket.user, ticket.model_id), None)

    # putting away

    def unused_for(self, seconds: float) -> list[Key]:
        """Models in the backend's memory that nothing has used for so long; longest first."""
        before = time.monotonic() - seconds
        used_at = {key: self._used_at.get(key, 0.0) for key in self.positions}
        return sorted((k for k, at in used_at.items() if at <= before), key=used_at.__getitem__)

    async def offload(self, lanes: Lanes, key: Key) -> bool:
        """Free what a model has in memory once all of it is on disk: its next use brings it back,
        the same to the bit. False: it is not there, or cannot be kept just now."""
        async with lanes.between_operations(*key):
            position = self.positions.get(key)
            if position is None or not await self._snapshots.keep(key, position):
                return False
            self.gone(key)  # first, for the next call may be cut short
            await self._backend.delete_model(key[1])
        return True

    def gone(self, key: Key) -> None:
        """Its memory is freed, or will be before anything else."""
        for by_key in (self._there, self._positions, self._used_at):
            by_key.pop(key, None)
        self._returns.forget(key)

    def deleted(self, key: Key) -> None:
        """The backend has it no more, and nothing of it is to be kept but what it published."""
        self._positions.pop(key, None)

    async def keep_version(self, published: Published) -> None:
        """On disk, so that it can be published again. Raises TinkercloudError, OSError."""
        if published.model is not None:
            await self._snapshots.keep_version(published.model, published.key, published.version)

    # bringing back

    async def ensure(self, lanes: Lanes, user: str, model_id: str) -> None:
        """What the model has published, and itself, are in the backend's memory."""
        if not self.is_offered or self._is_there((user, model_id)):
            return
        async with lanes.between_operations(user, model_id):
            await self._bring_back((user, model_id))

    async def models(self) -> list[tuple[str, str]]:
        """(model, user) of those that can be brought back."""
        return await self._journal.models()

    def _is_there(self, key: Key) -> bool:
        return self._there.get(key) == self._backend.incarnation()

    def delay_of(self, subject: str) -> str | None:
        """Why what is for this model waits, in words for its user; None: not for its return."""
        return self._returns.delay_of(subject)

    async def _bring_back(self, key: Key, *, alone: bool = False) -> None:
        """Called where no operation of the model runs. alone: `_suspects` is held."""
        self._used_at[key] = time.monotonic()
        if not self.is_offered or self._is_there(key):
            return
        await self.recorded()
        with self._returns.begin(key) as way:
            await self._try_until_back(key, way, alone=alone)

    async def _try_until_back(self, key: Key, way: Return, *, alone: bool) -> None:
        wait_s, num_failed = FIRST_WAIT_S, 0
        while not self._is_there(key):
            async with self._suspects if way.num_ends and not alone else nullcontext():
                now = self._backend.incarnation()
                assert now is not None
                try:
                    self._positions[key] = await self._restored(key, way)
                except TinkercloudError as error:
                    logger.warning("%s is not back yet: %s", key[1], error)
                    if isinstance(error, EngineDied):
                        way.engine_ended()
                    elif self._backend.incarnation() == now:
                        num_failed += 1
                        if _is_final(error) or num_failed == MAX_FAILURES:
                            raise
                else:
                    self._there[key] = now
                    continue  # not yet, where the engine ended after its last answer
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _restored(self, key: Key, way: Return) -> int:
        """Memory that is short is no fault of the operation that waits for its model: it would be
        taken as one that ran."""
        try:
            return await self._restore(key, way)
        except MemoryShort as error:
            raise ServerFault(
                f"{key[1]} is kept on the server's disk, and there is no memory to bring it back "
                f"just now: {error}"
            ) from error

    async def _restore(self, key: Key, way: Return) -> int:
        """The position of the last operation that the model has now."""
        user, model_id = key
        began, position, num_done = time.monotonic(), 0, 0
        if await self._journal.is_ended(user, model_id):  # a sample asked for what it had published
            return 0
        way.doing = READS_SNAPSHOT
        await self._snapshots.settle(key)  # once it is on record, the one before it is removed
        snapshot = await self._restore_newest(key)
        if snapshot is not None:
            position = snapshot.position
        while operation := await self._journal.next_after(user, model_id, position):
            way.doing = f"its operation {operation.seq_id} ({operation.kind}) is done again"
            await self._do_again(operation, await self._base_model(key))
            position, num_done = operation.position, num_done + 1
        await self._note_numerics(key, position)
        if snapshot is not None or num_done:
            self._num_recovered += 1
            took_s = time.monotonic() - began
            kept = "no snapshot" if snapshot is None else f"the snapshot of {snapshot.position}"
            logger.info(
                "%s is back: %s and %d operations, in %.1f s", model_id, kept, num_done, took_s
            )
        return position

    async def _base_model(self, key: Key) -> str:
        """As the backend names it."""
        user, model_id = key
        model = await self._metadata.model(model_id, user)
        if model is None:
            raise CannotComeBack(f"the model {model_id} is not on record")
        return self._catalog.backend_name(model.base_model)

    async def _restore_newest(self, key: Key) -> Snapshot | None:
        """The newest snapshot that can be read, None where there is none: then all operations are
        done again. Raises CannotComeBack where some of these are not kept."""
        snapshots = await self._journal.snapshots(*key)
        damage: CannotComeBack | None = None
        for snapshot in reversed(snapshots):
            try:
                await self._restore_snapshot(
                    key[1], await self._base_model(key), snapshot.directory
                )
            except CannotComeBack as error:
                logger.error("%s; what the archive keeps from before it is tried", error)
                damage = damage or error
            else:
                return snapshot
        if damage is not None:
            first = await self._journal.next_after(*key, 0)
            if first is None or first.position > FIRST_POSITION:
                raise damage
        return None

    async def _restore_snapshot(self, model_id: str, base_model: str, directory: str) -> None:
        place = self._files.data_dir / directory
        try:
            await self._backend.restore_state(model_id, base_model, place)
        except MemoryShort:
            raise
        except (StateDamaged, UserError) as error:
            raise CannotComeBack(
                f"the snapshot of {model_id} cannot be read ({error}); go on from your last "
                "checkpoint, and see that the disk is sound"
            ) from error

    async def _do_again(self, operation: RanOperation, base_model: str) -> None:
        loaded = self._files.loaded(operation.model_id, operation.request_id)
        try:
            computed = await self._replayer.do(operation, base_model, loaded)
            if operation.kind == PUBLISH:
                await self.publish_again(operation)
        except MemoryShort:
            raise
        except UserError as error:
            raise CannotComeBack(
                f"{operation.model_id} cannot be brought back: its operation "
                f"{operation.seq_id} ({operation.kind}) gives now: {error}; go on from your last "
                "checkpoint"
            ) from error
        if operation.digest not in (None, hashlib.sha256(computed).digest()):
            await self._note_difference(operation, computed)

    # exactness

    async def _note_numerics(self, key: Key, position: int) -> None:
        numerics = self._backend.numerics()
        recorded = await self._journal.numerics(*key)
        if recorded is not None and recorded.last == numerics:
            return
        await self._journal.set_numerics(*key, numerics, position)
        if recorded is not None:
            step = await self._journal.set_inexact(*key, position)
            logger.warning(
                "%s was computed by %r and goes on by %r: not bit-exact since step %d",
                *(key[1], recorded.last, numerics, step),
            )

    async def _note_difference(self, operation: RanOperation, computed: bytes) -> None:
        key = operation.user, operation.model_id
        recorded = await self._journal.numerics(*key)
        same = recorded is not None and recorded.last == self._backend.numerics()
        first = await self._journal.result(operation)
        nats = None
        if first is not None and operation.kind == FORWARD_BACKWARD:
            nats = deviation(first, computed)
            self._deviation = max(self._deviation, nats)
        logger.log(
            logging.ERROR if same else logging.WARNING,
            "operation %d (%s) of %s gave other bits when it was done again; largest difference "
            "of a log-probability: %s",
            *(operation.seq_id, operation.kind, operation.model_id),
            "the first result is not kept" if nats is None else f"{nats:.3g} nats",
        )
        if same:
            await self._journal.set_inexact(*key, operation.position)

    def stats(self) -> dict[str, float]:
        """replay_deviation_nats: the largest difference between a log-probability that a client got
        and the same one computed again after an end. recoveries_total: models brought back."""
        return {
            "replay_deviation_nats": self._deviation,
            "recoveries_total": self._num_recovered,
        }

    async def end_run(self, user: str, model_id: str) -> None:
        """The model is no more, and nothing samples what it published."""
        key = user, model_id
        self.gone(key)
        if self.is_offered:
            await self._snapshots.end_run(key)


def _is_final(error: TinkercloudError) -> bool:
    """Not where memory is short just now: what once succeeded does again."""
    return isinstance(error, CannotComeBack | UserError)


async def _nothing_is_late() -> None:
    return


async def _nothing_to_publish(operation: RanOperation) -> None:
    return
