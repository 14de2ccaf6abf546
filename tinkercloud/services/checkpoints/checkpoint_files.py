"""Checkpoint folders on disk: sealed with hashes, moved into place whole, verified before use."""

import json
import shutil
import uuid
from pathlib import Path

from tinkercloud import flushing
from tinkercloud.errors import ServerFault
from tinkercloud.fingerprints import file_sha256

MANIFEST = "manifest.json"
TEMPORARY_PREFIX = ".tmp-"
RECOVERY_FOLDER = "recovery"
"""Of a data folder: what models in training come back from."""


def new_temporary(parent: Path) -> Path:
    """A fresh folder in `parent`, where the checkpoint will be: on one file system, so that the
    rename is atomic."""
    directory = parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
    make_folder(parent)
    directory.mkdir()
    return directory


def make_folder(folder: Path) -> None:
    """With its parents; afterwards all of them are there even through a power cut."""
    if not folder.exists():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        try:
            flushing.flush(folder.parent)
        except OSError:  # or the next one would believe that it lasts
            folder.rmdir()
            raise


def flush_folders(root: Path, num_levels: int) -> None:
    """The names of folders below root, so many levels deep: a process that was killed may have made
    them and not flushed, and `make_folder` takes what is there for flushed."""
    if root.is_dir():
        flushing.flush(root.parent)
    folders = [root] if root.is_dir() else []
    for _ in range(num_levels):
        for folder in folders:
            flushing.flush(folder)
        folders = [each for folder in folders for each in folder.iterdir() if each.is_dir()]


def seal(directory: Path, about: dict[str, object]) -> int:
    """Write the manifest and flush every file to disk; the size of the whole in bytes."""
    files = {
        str(path.relative_to(directory)): {
            "sha256": file_sha256(path),
            "size_bytes": path.stat().st_size,
        }
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    manifest = directory / MANIFEST
    manifest.write_text(json.dumps({"format": 1, **about, "files": files}, indent=1))
    for path in (*directory.rglob("*"), directory):
        flushing.flush(path)
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def move_into_place(temporary: Path, target: Path) -> None:
    """Rename; afterwards the folder is at target even through a power cut."""
    temporary.rename(target)
    flushing.flush(target.parent)


def verify(directory: Path) -> None:
    """Raises ServerFault unless every file is as it was sealed."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        for name, expected in manifest["files"].items():
            if file_sha256(directory / name) != expected["sha256"]:
                raise ServerFault(f"file {name!r} of this checkpoint is not as it was saved")
    except (OSError, ValueError, KeyError) as error:
        raise ServerFault(f"this checkpoint cannot be read: {type(error).__name__}") from error


def link_files(source: Path, target: Path) -> None:
    """All files of a checkpoint but its manifest in another folder, without bytes written twice
    where the file system has hard links. Sealed files are never written again."""
    for path in source.iterdir():
        if path.name == MANIFEST:
            continue
        try:
            (target / path.name).hardlink_to(path)
        except OSError:
            shutil.copyfile(path, target / path.name)


def sealed_files(directory: Path) -> list[str]:
    """The names that the manifest lists. Raises ServerFault."""
    try:
        return sorted(json.loads((directory / MANIFEST).read_text())["files"])
    except (OSError, ValueError, KeyError) as error:
        raise ServerFault(f"this checkpoint cannot be read: {type(error).__name__}") from error


def remove(directory: Path) -> None:
    """Gone or already not there; empty parents of it are tidied up to two levels."""
    shutil.rmtree(directory, ignore_errors=True)
    for parent in list(directory.parents)[:2]:
        try:
            parent.rmdir()
        except OSError:
            return


def remove_others(directory: Path) -> None:
    """All that lies beside it."""
    others = [path for path in directory.parent.iterdir() if path != directory]
    for path in others:
        shutil.rmtree(path, ignore_errors=True)
    if others:
        flushing.flush(directory.parent)


def remove_temporaries(root: Path) -> None:
    """What a killed process left half written."""
    for directory in root.glob(f"*/*/*/{TEMPORARY_PREFIX}*"):
        shutil.rmtree(directory, ignore_errors=True)


def folders_of(root: Path, model_id: str) -> list[Path]:
    """Of all checkpoints of a model."""
    return list((root / model_id).glob("*/*/*"))
