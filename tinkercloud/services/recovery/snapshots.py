"""Snapshots: the whole state of a model in training, written aside while it trains on.

The state is copied between two operations, which waits for the copy alone; the files are written
meanwhile. Without memory for a copy the next operation ends it, and only a model that rests has its
snapshot. How often: when as much has been computed since the last one as costs of a snapshot are
`SHARE` of. So a crash costs as much computing again at most, and training pays that share.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from tinkercloud.backends.base import Backend
from tinkercloud.errors import TinkercloudError, VersionLost
from tinkercloud.services.recovery.recovery_files import RecoveryFiles
from tinkercloud.services.recovery.run_archive import RunArchive
from tinkercloud.services.recovery.version_store import VersionStore
from tinkercloud.storage.journal import JournalStorage, Taken

logger = logging.getLogger(__name__)

SHARE = 0.03
FIRST_COST_S = 0.1
"""Of a model's first snapshot, before one was measured."""
Key = tuple[str, str]  # user, model


@dataclass(slots=True)
class _State:
    """Of a model. debt_s: computing since the last snapshot; tried_s: until the last attempt since,
    which failed. cost_s: of the last one, copying and writing. writing: the one that is being
    made."""

    debt_s: float = 0.0
    tried_s: float = 0.0
    cost_s: float = FIRST_COST_S
    writing: asyncio.Task[None] | None = None

    @property
    def is_due(self) -> bool:
        return self.writing is None and (self.debt_s - self.tried_s) * SHARE >= self.cost_s


@dataclass(frozen=True, slots=True)
class _Copied:
    """A model as it was after its operation at `position`, in the memory of the backend that began
    with `incarnation`. versions: that it has published, by key."""

    incarnation: int | None
    position: int
    copy: int
    versions: Mapping[str, str]


class Snapshots:
    def __init__(
        self,
        backend: Backend,
        journal: JournalStorage,
        versions: VersionStore,
        files: RecoveryFiles,
        archive: RunArchive,
    ):
        self._backend = backend
        self._journal = journal
        self._versions = versions
        self.files = files
        self._archive = archive
        self._states: dict[Key, _State] = {}
        self._keeping = asyncio.Lock()  # of versions, each once
        self._num_taken, self._num_bytes, self._seconds = 0, 0, 0.0
        self._num_underway = 0

    async def start(self) -> None:
        await self.files.start()
        for key, debt_s in (await self._journal.debts()).items():
            self._state(key).debt_s = debt_s

    async def settled(self) -> None:
        """Until none is being written."""
        for key in list(self._states):
            await self.settle(key)

    async def settle(self, key: Key) -> None:
        """Until none of the model is being written."""
        writing = self._state(key).writing
        if writing is not None:
            await asyncio.wait([writing])

    async def close(self, keys: Mapping[Key, int], within_s: float) -> None:
        """A last snapshot of models that have computed since theirs, as far as the time allows.
        keys: models and the positions of their last operations."""
        deadline = time.monotonic() + within_s
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + within_s):
                for key, position in keys.items():
                    await self.settle(key)
                    if self._state(key).debt_s > 0 and time.monotonic() < deadline:
                        await self.take(key, position)
                        await self.settle(key)
        except TimeoutError:
            logger.warning("stopped before the last snapshots; more is computed again at the start")
        tasks = [s.writing for s in self._states.values() if s.writing is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # how often

    async def ended(self, key: Key, position: int, took_s: float) -> None:
        """An operation of the model has ended, and no other one runs."""
        state = self._state(key)
        state.debt_s += took_s
        if state.is_due:
            await self.take(key, position)

    def stats(self) -> dict[str, float]:
        """replay_debt: seconds of computing that a crash now would cost. underway: copied or
        written just now."""
        return {
            "replay_debt_seconds": sum(state.debt_s for state in self._states.values()),
            "snapshots": self._num_taken,
            "snapshots_underway": self._num_underway,
            "snapshot_bytes": self._num_bytes,
            "snapshot_seconds": self._seconds,
        }

    # taking one

    async def keep(self, key: Key, position: int) -> bool:
        """Whether a snapshot has the model as it is; taken now where none does. position: of its
        last operation. Called between two operations of the model."""
        await self.settle(key)
        if not await self._is_kept(key):
            await self.take(key, position)
            await self.settle(key)
        return await self._is_kept(key)

    async def _is_kept(self, key: Key) -> bool:
        newest = await self._journal.newest_snapshot(*key)
        return newest is not None and not await self._journal.next_after(*key, newest.position)

    async def take(self, key: Key, position: int) -> None:
        """Copy the model as it is; the writing goes on when this returns. Called between two
        operations of the model."""
        state = self._state(key)
        began = self._backend.incarnation()
        self._num_underway += 1
        try:
            copy = await self._backend.copy_state(key[1])
        except Exception as error:  # noqa: BLE001 - a model goes on without; the next one may do
            self._num_underway -= 1
            logger.warning("no snapshot of %s: %s", key[1], error)
            return
        debt_s, state.debt_s, state.tried_s = state.debt_s, 0.0, 0.0
        copied = _Copied(began, position, copy, self._versions.of_model(key))
        state.writing = asyncio.create_task(
            self._write_or_give_up(key, copied, debt_s), name=f"snapshot {key[1]}"
        )

    async def _write_or_give_up(self, key: Key, copied: _Copied, debt_s: float) -> None:
        state, began = self._state(key), time.monotonic()
        try:
            await self._write(key, copied)
        except (TinkercloudError, OSError) as error:
            logger.warning("the snapshot of %s was given up: %s", key[1], error)
            state.debt_s += debt_s
            # Another attempt may cost as much again: not with each operation.
            state.tried_s = debt_s
            state.cost_s = max(state.cost_s, time.monotonic() - began)
            if isinstance(error, OSError):
                # Its folder could not be made, so the backend was not told to write it: a model
                # that rests would keep it in memory.
                with suppress(TinkercloudError):
                    await self._backend.drop_copy(copied.copy)
        finally:
            state.writing = None
            self._num_underway -= 1

    async def _write(self, key: Key, copied: _Copied) -> None:
        user, model_id = key
        began, position = time.monotonic(), copied.position
        target = self.files.snapshot(model_id, position)
        async with self.files.new(target) as temporary:
            cost = await self._backend.write_state(copied.copy, temporary)
            for version_key, version in copied.versions.items():
                try:
                    await self.keep_version(key, version_key, version)
                except VersionLost:
                    # Released meanwhile, so nobody samples it. Not so where the engine ended after
                    # the state was written: a replay from here would never publish it again.
                    if self._backend.incarnation() != copied.incarnation:
                        raise
        directory = self.files.relative(target)
        await self._journal.put_snapshot(Taken(model_id, user, position, directory, cost.num_bytes))
        await self._archive.has_snapshot(user, model_id)
        took_s = cost.copy_s + time.monotonic() - began
        self._state(key).cost_s = took_s
        self._num_taken += 1
        self._num_bytes += cost.num_bytes
        self._seconds += took_s

    async def keep_version(self, key: Key, version_key: str, version: str) -> None:
        """What a model published, as files, once: a version never changes. Raises VersionLost."""
        user, model_id = key
        target = self.files.version(model_id, version_key, version)
        directory = self.files.relative(target)
        async with self._keeping:
            if await self._journal.version_directory(user, version_key) == directory:
                return
            async with self.files.new(target) as temporary:
                await self._backend.write_version(version, temporary)
            old = await self._journal.keep_version(user, model_id, version_key, directory)
        if old is not None:
            await self.files.remove(self.files.data_dir / old)

    async def end_run(self, key: Key) -> None:
        """The model is no more."""
        await self.settle(key)
        self._states.pop(key, None)
        await self._archive.end_run(*key)

    def _state(self, key: Key) -> _State:
        return self._states.setdefault(key, _State())
