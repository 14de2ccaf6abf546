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
from pathlib import Path

from tinkercloud.backends.base import Backend
from tinkercloud.core.lanes import Lanes
from tinkercloud.core.pending import Work
from tinkercloud.errors import EngineDied, ModelStateLost, ServerFault, TinkercloudError
from tinkercloud.services.common.catalog import Catalog
from tinkercloud.services.models.snapshots import Key, Snapshots
from tinkercloud.storage.futures import Outcome, Ticket
from tinkercloud.storage.journal import JournalStorage, RanOperation
from tinkercloud.storage.metadata import MetadataStorage

logger = logging.getLogger(__name__)

Replay = Callable[[RanOperation], Awaitable[bytes]]
"""Do an operation again on its model, and nothing else; what it computed (`Outcome.computed`)."""
MAX_ATTEMPTS = 3
RETRY_S = 0.1


class Recovery:
    """The keeper of lanes (`core.lanes.Keeper`)."""

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
        self._replays: dict[str, Replay] = {}  # by kind
        self._there: dict[Key, int] = {}  # the beginning of the backend's memory that has the model
        self._positions: dict[Key, int] = {}  # of what ran last, of models that are there
        self._suspects = asyncio.Lock()
        self.recorded: Callable[[], Awaitable[None]] = _nothing_is_late
        """Waits until every outcome is on record (`TaskManager.recorded`)."""

    @property
    def is_offered(self) -> bool:
        """Whether this backend's models come back."""
        return self._backend.incarnation() is not None

    def replays(self, kind: str, replay: Replay) -> None:
        """How operations of this kind, which change their model, are done again."""
        self._replays[kind] = replay

    @property
    def positions(self) -> dict[Key, int]:
        """Of models in the backend's memory: the position of the last operation."""
        now = self._backend.incarnation()
        return {key: p for key, p in self._positions.items() if self._there.get(key) == now}

    # the keeper of lanes

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
        raise EngineDied(
            f"the engine process ended each of the {MAX_ATTEMPTS} times that this {ticket.kind} "
            "was tried, and it is not tried again: send less at once, and see the server's log for "
            "the reason. The model is as it was before"
        )

    async def _attempt(self, key: Key, work: Work, attempt: int) -> Outcome | None:
        """None: the engine ended underway."""
        await self._bring_back(key)
        began = self._backend.incarnation()
        try:
            return await work()
        except EngineDied as error:
            if not self.is_offered:
                raise
            logger.warning("attempt %d of an operation of %s: %s", attempt, key[1], error)
        except ModelStateLost:
            if self._backend.incarnation() == began:
                raise
        return None

    async def ended(self, ticket: Ticket, position: int, took_s: float) -> None:
        assert ticket.model_id is not None
        key = ticket.user, ticket.model_id
        if not self._is_there(key):
            return  # perhaps half of it: a snapshot now would be of no state that it ever had
        self._positions[key] = position
        await self._snapshots.ended(key, position, took_s)

    def ended_unrecorded(self, ticket: Ticket) -> None:
        """The model has the operation and the journal has not: there is no position to take a
        snapshot at, as the operation would be done again after it."""
        assert ticket.model_id is not None
        self._positions.pop((ticket.user, ticket.model_id), None)

    # bringing back

    async def ensure(self, lanes: Lanes, user: str, model_id: str) -> None:
        """What the model has published, and itself, are in the backend's memory."""
        if not self.is_offered or self._is_there((user, model_id)):
            return
        async with lanes.between_operations(user, model_id):
            await self._bring_back((user, model_id))

    async def kept_version(self, user: str, version_key: str) -> Path | None:
        """The folder of a checkpoint with the weights of a published version."""
        directory = await self._journal.version_directory(user, version_key)
        return None if directory is None else self._snapshots.data_dir / directory

    async def models(self) -> list[tuple[str, str]]:
        """(model, user) of those that can be brought back."""
        return await self._journal.models()

    def _is_there(self, key: Key) -> bool:
        return self._there.get(key) == self._backend.incarnation()

    async def _bring_back(self, key: Key) -> None:
        """Called where no operation of the model runs."""
        if self.is_offered and not self._is_there(key):
            await self.recorded()
        while self.is_offered and not self._is_there(key):
            now = self._backend.incarnation()
            assert now is not None
            try:
                self._positions[key] = await self._restore(key)
            except EngineDied as error:
                logger.warning("%s is not back yet: %s", key[1], error)
                await asyncio.sleep(RETRY_S)
                continue
            except TinkercloudError as error:
                if self._backend.incarnation() == now:
                    raise
                # It ended between two operations: the next one found no model.
                logger.warning("%s is not back yet: %s", key[1], error)
                continue
            self._there[key] = now

    async def _restore(self, key: Key) -> int:
        """The position of the last operation that the model has now."""
        user, model_id = key
        began, position, num_done = time.monotonic(), 0, 0
        snapshot = await self._journal.newest_snapshot(user, model_id)
        if snapshot is not None:
            await self._restore_snapshot(key, snapshot.directory)
            position = snapshot.position
        while operation := await self._journal.next_after(user, model_id, position):
            await self._do_again(operation)
            position, num_done = operation.position, num_done + 1
        await self._note_numerics(key, position)
        if snapshot is not None or num_done:
            took_s = time.monotonic() - began
            kept = "no snapshot" if snapshot is None else f"the snapshot of {snapshot.position}"
            logger.info(
                "%s is back: %s and %d operations, in %.1f s", model_id, kept, num_done, took_s
            )
        return position

    async def _restore_snapshot(self, key: Key, directory: str) -> None:
        user, model_id = key
        model = await self._metadata.model(model_id, user)
        if model is None:
            raise ModelStateLost(model_id)
        name = self._catalog.backend_name(model.base_model)
        try:
            await self._backend.restore_state(model_id, name, self._snapshots.data_dir / directory)
        except EngineDied:
            raise
        except TinkercloudError as error:
            raise ServerFault(
                f"the snapshot of {model_id} cannot be read ({error}); go on from your last "
                "checkpoint, and see that the disk is sound"
            ) from error

    async def _do_again(self, operation: RanOperation) -> None:
        try:
            computed = await self._replays[operation.kind](operation)
        except EngineDied:
            raise
        except TinkercloudError as error:
            raise ServerFault(
                f"{operation.model_id} cannot be brought back: its operation "
                f"{operation.seq_id} ({operation.kind}) gives now: {error}; go on from your last "
                "checkpoint"
            ) from error
        if operation.digest not in (None, hashlib.sha256(computed).digest()):
            await self._note_difference(operation)

    # exactness

    async def _note_numerics(self, key: Key, position: int) -> None:
        numerics = self._backend.numerics()
        known = await self._journal.numerics(*key)
        if known is not None and known[0] == numerics:
            return
        since = None if known is None else position
        if known is not None:
            logger.warning(
                "%s was computed by %r and goes on by %r: not bit-exact since its operation %d",
                *(key[1], known[0], numerics, position),
            )
        await self._journal.set_numerics(*key, numerics, since)

    async def _note_difference(self, operation: RanOperation) -> None:
        numerics = self._backend.numerics()
        known = await self._journal.numerics(operation.user, operation.model_id)
        same = known is not None and known[0] == numerics
        logger.log(
            logging.ERROR if same else logging.WARNING,
            "operation %d (%s) of %s gave other bits when it was done again",
            *(operation.seq_id, operation.kind, operation.model_id),
        )
        if same:
            await self._journal.set_numerics(
                operation.user, operation.model_id, numerics, operation.position
            )

    async def forget(self, user: str, model_id: str) -> None:
        """The model is no more, and nothing samples what it published."""
        key = user, model_id
        self._there.pop(key, None)
        self._positions.pop(key, None)
        if self.is_offered:
            await self._snapshots.forget(key)


async def _nothing_is_late() -> None:
    return
