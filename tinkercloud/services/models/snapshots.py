"""Snapshots: the whole state of a model in training, written aside while it trains on.

The state is copied between two operations, which waits for the copy alone; the files are written
meanwhile. How often: when as much has been computed since the last one as costs of a snapshot are
`SHARE` of. So a crash costs as much computing again at most, and training pays that share.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tinkercloud.backends.base import Backend
from tinkercloud.errors import EngineDied, StateCopyLost, StorageFailed, VersionLost
from tinkercloud.services.checkpoints import checkpoint_files
from tinkercloud.services.models.version_store import VersionStore
from tinkercloud.storage.journal import JournalStorage, Snapshot

logger = logging.getLogger(__name__)

FOLDER = "recovery"
SHARE = 0.03
FIRST_COST_S = 0.1
"""Of a model's first snapshot, before one was measured."""
Key = tuple[str, str]  # user, model


@dataclass(slots=True)
class _State:
    """Of a model. debt_s: computing since the last snapshot. cost_s: of that one, copying and
    writing. writing: the one that is being made."""

    debt_s: float = 0.0
    cost_s: float = FIRST_COST_S
    writing: asyncio.Task[None] | None = None

    @property
    def is_due(self) -> bool:
        return self.writing is None and self.debt_s * SHARE >= self.cost_s


class Snapshots:
    """On disk: data_dir/recovery/MODEL/ with `snapshot-POSITION`, `version-NAME` for published
    weights, and `loaded-REQUEST` for checkpoints that were loaded into the model."""

    def __init__(
        self, backend: Backend, journal: JournalStorage, versions: VersionStore, data_dir: Path
    ):
        self._backend = backend
        self._journal = journal
        self._versions = versions
        self.data_dir = data_dir
        self._states: dict[Key, _State] = {}
        self._num_taken, self._num_bytes, self._seconds = 0, 0, 0.0

    async def start(self) -> None:
        """What a killed process left half written goes."""
        await asyncio.to_thread(_remove_temporaries, self.data_dir / FOLDER)
        await asyncio.to_thread(checkpoint_files.flush_folders, self.data_dir / FOLDER, 1)
        for key, debt_s in (await self._journal.debts()).items():
            self._state(key).debt_s = debt_s

    async def settled(self) -> None:
        """Until none is being written."""
        for key in list(self._states):
            await self._settle(key)

    async def close(self, keys: Mapping[Key, int], within_s: float) -> None:
        """A last snapshot of models that have computed since theirs, as far as the time allows.
        keys: models and the positions of their last operations."""
        deadline = time.monotonic() + within_s
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + within_s):
                for key, position in keys.items():
                    await self._settle(key)
                    if self._state(key).debt_s > 0 and time.monotonic() < deadline:
                        await self.take(key, position)
                        await self._settle(key)
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
        """replay_debt: seconds of computing that a crash now would cost."""
        return {
            "replay_debt_seconds": sum(state.debt_s for state in self._states.values()),
            "snapshots": self._num_taken,
            "snapshot_bytes": self._num_bytes,
            "snapshot_seconds": self._seconds,
        }

    # taking one

    async def take(self, key: Key, position: int) -> None:
        """Copy the model as it is; the writing goes on when this returns. Called between two
        operations of the model."""
        state = self._state(key)
        try:
            copy = await self._backend.copy_state(key[1])
        except Exception as error:  # noqa: BLE001 - a model goes on without; the next one may do
            logger.warning("no snapshot of %s: %s", key[1], error)
            return
        debt_s, state.debt_s = state.debt_s, 0.0
        versions = self._versions.of_model(key[1])
        state.writing = asyncio.create_task(
            self._write_or_give_up(key, position, copy, versions, debt_s), name=f"snapshot {key[1]}"
        )

    async def _write_or_give_up(
        self, key: Key, position: int, copy: int, versions: Mapping[str, str], debt_s: float
    ) -> None:
        state = self._state(key)
        try:
            await self._write(key, position, copy, versions)
        except (EngineDied, StateCopyLost, StorageFailed, OSError) as error:
            logger.warning("the snapshot of %s was given up: %s", key[1], error)
            state.debt_s += debt_s
        finally:
            state.writing = None

    async def _write(self, key: Key, position: int, copy: int, versions: Mapping[str, str]) -> None:
        user, model_id = key
        began = time.monotonic()
        place = self.folder(model_id)
        temporary = await asyncio.to_thread(checkpoint_files.new_temporary, place)
        try:
            cost = await self._backend.write_state(copy, temporary)
            for version_key, version in versions.items():
                await self._keep_version(user, model_id, version_key, version)
            target = place / f"snapshot-{position}"
            await asyncio.to_thread(_replace, temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        directory = str(target.relative_to(self.data_dir))
        await self._journal.put_snapshot(
            Snapshot(model_id, user, position, directory, cost.num_bytes)
        )
        needed = {f"loaded-{each}" for each in await self._journal.operations(user, model_id)}
        await asyncio.to_thread(_remove_others, place, needed | {target.name})
        took_s = cost.copy_s + time.monotonic() - began
        self._state(key).cost_s = took_s
        self._num_taken += 1
        self._num_bytes += cost.num_bytes
        self._seconds += took_s

    async def _keep_version(self, user: str, model_id: str, key: str, version: str) -> None:
        """As files, once: a version never changes."""
        # Named by both: the version of an inflight sampler's key changes.
        name = sha256(f"{key} {version}".encode()).hexdigest()[:24]
        target = self.folder(model_id) / f"version-{name}"
        directory = str(target.relative_to(self.data_dir))
        if await self._journal.version_directory(user, key) == directory:
            return
        temporary = await asyncio.to_thread(checkpoint_files.new_temporary, self.folder(model_id))
        try:
            await self._backend.write_version(version, temporary)
            await asyncio.to_thread(_replace, temporary, target)
        except VersionLost:  # released meanwhile: nobody samples it
            shutil.rmtree(temporary, ignore_errors=True)
            return
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        old = await self._journal.keep_version(user, model_id, key, directory)
        if old is not None:
            await asyncio.to_thread(shutil.rmtree, self.data_dir / old, ignore_errors=True)

    # files

    def folder(self, model_id: str) -> Path:
        return self.data_dir / FOLDER / model_id

    def loaded(self, model_id: str, request_id: str) -> Path:
        """Where `keep_loaded` has put the files."""
        return self.folder(model_id) / f"loaded-{request_id}"

    async def keep_loaded(self, model_id: str, request_id: str, checkpoint: Path) -> Path:
        """The files of a checkpoint that the model is made of from now on, whatever becomes of the
        checkpoint."""
        target = self.loaded(model_id, request_id)
        temporary = await asyncio.to_thread(checkpoint_files.new_temporary, target.parent)
        await asyncio.to_thread(_link_files, checkpoint, temporary)
        await asyncio.to_thread(_replace, temporary, target)
        return target

    async def forget(self, key: Key) -> None:
        """The model is no more."""
        await self._settle(key)
        self._states.pop(key, None)
        await self._journal.forget(*key)
        await asyncio.to_thread(shutil.rmtree, self.folder(key[1]), ignore_errors=True)

    async def _settle(self, key: Key) -> None:
        writing = self._state(key).writing
        if writing is not None:
            await asyncio.wait([writing])

    def _state(self, key: Key) -> _State:
        return self._states.setdefault(key, _State())


def _link_files(source: Path, target: Path) -> None:
    """Flushed to the disk."""
    checkpoint_files.link_files(source, target)
    for path in (*target.iterdir(), target):
        checkpoint_files.flush(path)


def _replace(temporary: Path, target: Path) -> None:
    """A folder of that name was left by a process that ended before it was on record."""
    shutil.rmtree(target, ignore_errors=True)
    checkpoint_files.move_into_place(temporary, target)


def _remove_others(place: Path, needed: Set[str]) -> None:
    """What a snapshot makes superfluous. needed: names; checkpoints that were loaded after it, too,
    perhaps while it was written."""
    for pattern in ("snapshot-*", "loaded-*"):
        for directory in place.glob(pattern):
            if directory.name not in needed:
                shutil.rmtree(directory, ignore_errors=True)


def _remove_temporaries(root: Path) -> None:
    for directory in root.glob(f"*/{checkpoint_files.TEMPORARY_PREFIX}*"):
        shutil.rmtree(directory, ignore_errors=True)
