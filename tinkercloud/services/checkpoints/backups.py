"""A data folder as another folder, and back.

A backup holds the database as it was at one moment, the checkpoints that it names, what its models
in training come back from, and the drafts. It is made beside a running server: SQLite copies a
moment without stopping writers, and the files of a checkpoint or of a snapshot never change once it
is on record. What can be made or fetched again is left out:
caches, and base models.
"""

import json
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tinkercloud import flushing
from tinkercloud.errors import ServerFault, UserError
from tinkercloud.services.checkpoints import checkpoint_files
from tinkercloud.storage.database_copy import (
    checked_copy,
    copy_database,
    folders_of_runs,
    forget_checkpoints,
    require_sound,
)
from tinkercloud.storage.database_file import DATABASE_NAME, prepare_database_file

ABOUT = "backup.json"
DRAFTS = "drafts"
MAX_MOMENTS = 20
FETCHED = "models"  # of a data folder; what a restored one may hold before

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Copied:
    """gone: checkpoints that were deleted before their files were copied."""

    num_checkpoints: int
    num_bytes: int
    gone: int = 0

    def __str__(self) -> str:
        text = f"checkpoints: {self.num_checkpoints}; in all {self.num_bytes / 1e6:.1f} MB"
        return text + (f"; deleted meanwhile: {self.gone}" if self.gone else "")


def back_up(data_dir: Path, folder: Path, report: Report) -> Copied:
    """Make `folder`, whole and on disk, or leave nothing of that name. Raises UserError."""
    if not (data_dir / DATABASE_NAME).is_file():
        raise UserError(f"{data_dir} holds no server's data; name its folder with --data-dir")
    if folder.exists():
        raise UserError(f"{folder} is there already; name a folder that is not")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a backup that was interrupted
    with _whole_or_not_at_all(folder, [partial]):
        return _back_up(data_dir, folder, partial, report)


def _back_up(data_dir: Path, folder: Path, partial: Path, report: Report) -> Copied:
    checkpoint_files.make_folder(partial.parent)
    partial.mkdir(mode=0o700)
    directories = _copy_with_runs(data_dir, partial)
    gone: list[str] = []
    for directory in directories:
        if _copy_checkpoint(data_dir, partial, directory):
            report(f"copied {directory}")
        else:
            gone.append(directory)
    forget_checkpoints(partial, gone)
    if (data_dir / DRAFTS).is_dir():
        shutil.copytree(data_dir / DRAFTS, partial / DRAFTS, symlinks=True)
    about = {"format": 1, "made_at": time.time()}
    (partial / ABOUT).write_text(json.dumps(about), encoding="utf-8")
    num_bytes = _flush_all(partial)
    partial.rename(folder)
    flushing.flush(folder.parent)
    return Copied(len(directories) - len(gone), num_bytes, len(gone))


def restore(folder: Path, data_dir: Path, report: Report) -> Copied:
    """Copy a backup into a folder without data, after every file of it was compared with its hash.
    Raises UserError, and then data_dir is as it was."""
    if not (folder / ABOUT).is_file():
        raise UserError(f"{folder} is not a backup: it has no {ABOUT}")
    held = [path.name for path in data_dir.iterdir()] if data_dir.is_dir() else []
    left = sorted(name for name in held if name != FETCHED)
    if left:
        raise UserError(
            f"{data_dir} is not empty: it has {', '.join(left[:3])}. Move it aside, or name "
            "another folder with --data-dir"
        )
    directories = checked_copy(folder)
    for directory in directories:
        try:
            checkpoint_files.verify(folder / directory)
        except ServerFault as error:
            raise UserError(f"{folder / directory}: {error}") from error
        report(f"verified {directory}")
    aside = data_dir / f".{DATABASE_NAME}"
    made = [data_dir / DATABASE_NAME, aside]  # first: without it nobody takes the rest for whole
    made += [data_dir / path.name for path in folder.iterdir() if path.is_dir()]
    made += [] if held else [data_dir]
    with _whole_or_not_at_all(data_dir, made):
        num_bytes = _restore(folder, data_dir, aside)
    prepare_database_file(data_dir)
    return Copied(len(directories), num_bytes)


def _restore(folder: Path, data_dir: Path, aside: Path) -> int:
    """Bytes of all files."""
    checkpoint_files.make_folder(data_dir.parent)
    data_dir.mkdir(mode=0o700, exist_ok=True)
    flushing.flush(data_dir.parent)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.copytree(path, data_dir / path.name, symlinks=True)
    num_bytes = _flush_all(data_dir)
    # The database last, whole: a server that starts on half of a restored folder must not find it.
    num_bytes += shutil.copyfile(folder / DATABASE_NAME, aside).stat().st_size
    flushing.flush(aside)
    aside.rename(data_dir / DATABASE_NAME)
    flushing.flush(data_dir)
    return num_bytes


@contextmanager
def _whole_or_not_at_all(folder: Path, made: Sequence[Path]) -> Generator[None]:
    """UserError for what the disk refuses; what was made till then goes whatever is refused, so
    that it can be done again."""
    try:
        yield
    except Exception as error:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):
                path.unlink()
        if not isinstance(error, OSError):
            raise
        reason: object = error
        if isinstance(error, shutil.Error):  # one row for each file: (source, target, reason)
            reason = error.args[0][0][2]
        raise UserError(f"{folder} cannot be made, and nothing is left of it: {reason}") from error


def _copy_checkpoint(data_dir: Path, target: Path, directory: str) -> bool:
    """False where it was deleted meanwhile. Raises OSError, and UserError for files that are not as
    they were sealed: a backup of those would be found out when it is too late."""
    try:
        shutil.copytree(data_dir / directory, target / directory)
        checkpoint_files.verify(target / directory)
    except (OSError, ServerFault) as error:
        if (data_dir / directory).exists():
            if isinstance(error, OSError):
                raise
            raise UserError(
                f"{data_dir / directory}: {error}. Delete this checkpoint, then back up"
            ) from error
        shutil.rmtree(target / directory, ignore_errors=True)
        return False
    return True


def _copy_with_runs(data_dir: Path, target: Path) -> list[str]:
    """The database, and the folders that its models come back from; the folders of checkpoints that
    it names. Snapshots are replaced meanwhile: then the moment is a later one. Raises UserError
    where they are replaced faster than copied."""
    for _ in range(MAX_MOMENTS):
        (target / DATABASE_NAME).unlink(missing_ok=True)
        directories = copy_database(data_dir, target)
        require_sound(target, data_dir)
        needed = folders_of_runs(target, checkpoint_files.RECOVERY_FOLDER)
        if all(_copy_folder(data_dir, target, directory) for directory in needed):
            _remove_other_folders(target, needed)
            return directories
    raise UserError(
        "snapshots of models in training were replaced faster than they could be copied; back up "
        "onto a faster disk, or when less is trained"
    )


def _copy_folder(data_dir: Path, target: Path, directory: str) -> bool:
    """False where it is gone."""
    copy = target / directory
    if copy.is_dir():  # of an earlier moment; its content never changes
        return True
    try:
        shutil.copytree(data_dir / directory, copy)
    except (OSError, shutil.Error):
        if (data_dir / directory).exists():
            raise
        shutil.rmtree(copy, ignore_errors=True)
        return False
    return True


def _remove_other_folders(target: Path, needed: Sequence[str]) -> None:
    """Those of earlier moments."""
    for path in target.glob(f"{checkpoint_files.RECOVERY_FOLDER}/*/*"):
        if str(path.relative_to(target)) not in needed:
            shutil.rmtree(path)


def _flush_all(folder: Path) -> int:
    """Everything below a folder, and itself, onto the disk; bytes of the files."""
    paths = [path for path in (*folder.rglob("*"), folder) if not path.is_symlink()]
    for path in paths:
        flushing.flush(path)
    return sum(path.stat().st_size for path in paths if path.is_file())
