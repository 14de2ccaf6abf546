"""What models come back from, as files.

data_dir/recovery/MODEL/ has `snapshot-POSITION`, `version-NAME` for published weights, and
`loaded-REQUEST` for checkpoints that were loaded into the model.
"""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Set
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

from tinkercloud import flushing
from tinkercloud.services.checkpoints import checkpoint_files


class RecoveryFiles:
    def __init__(self, data_dir: Path):
        self.data_dir = data_dir

    async def start(self) -> None:
        """What a killed process left half written goes; what it left whole is flushed."""
        root = self.data_dir / checkpoint_files.RECOVERY_FOLDER
        await asyncio.to_thread(_remove_temporaries, root)
        await asyncio.to_thread(checkpoint_files.flush_folders, root, 1)

    def folder(self, model_id: str) -> Path:
        return self.data_dir / checkpoint_files.RECOVERY_FOLDER / model_id

    def snapshot(self, model_id: str, position: int) -> Path:
        return self.folder(model_id) / f"snapshot-{position}"

    def version(self, model_id: str, key: str, version: str) -> Path:
        """Named by both: the version of an inflight sampler's key changes."""
        name = sha256(f"{key} {version}".encode()).hexdigest()[:24]
        return self.folder(model_id) / f"version-{name}"

    def loaded(self, model_id: str, request_id: str) -> Path:
        """Where `keep_loaded` has put the files."""
        return self.folder(model_id) / f"loaded-{request_id}"

    def relative(self, path: Path) -> str:
        return str(path.relative_to(self.data_dir))

    @asynccontextmanager
    async def new(self, target: Path) -> AsyncGenerator[Path]:
        """An empty folder to fill; it has its name, whole, once the block ends."""
        temporary = await asyncio.to_thread(checkpoint_files.new_temporary, target.parent)
        try:
            yield temporary
            await asyncio.to_thread(_replace, temporary, target)
        except BaseException:  # cancelled too: nothing half written stays
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    async def keep_loaded(self, model_id: str, request_id: str, checkpoint: Path) -> Path:
        """The files of a checkpoint that the model is made of from now on, whatever becomes of the
        checkpoint."""
        target = self.loaded(model_id, request_id)
        async with self.new(target) as temporary:
            await asyncio.to_thread(_link_files, checkpoint, temporary)
        return target

    async def remove_others(self, model_id: str, needed: Set[str], *, versions: bool) -> None:
        """Snapshots and loaded checkpoints, and with `versions` these too, whose folders' names are
        not in `needed`."""
        patterns = ("snapshot-*", "loaded-*", *(("version-*",) if versions else ()))
        await asyncio.to_thread(_remove_others, self.folder(model_id), patterns, needed)

    async def remove(self, path: Path) -> None:
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)


def _link_files(source: Path, target: Path) -> None:
    """Flushed to the disk."""
    checkpoint_files.link_files(source, target)
    for path in (*target.iterdir(), target):
        flushing.flush(path)


def _replace(temporary: Path, target: Path) -> None:
    """A folder of that name was left by a process that ended before it was on record."""
    shutil.rmtree(target, ignore_errors=True)
    checkpoint_files.move_into_place(temporary, target)


def _remove_others(place: Path, patterns: tuple[str, ...], needed: Set[str]) -> None:
    for pattern in patterns:
        for directory in place.glob(pattern):
            if directory.name not in needed:
                shutil.rmtree(directory, ignore_errors=True)


def _remove_temporaries(root: Path) -> None:
    for directory in root.glob(f"*/{checkpoint_files.TEMPORARY_PREFIX}*"):
        shutil.rmtree(directory, ignore_errors=True)
