"""`tinkercloud backup` and `restore`, ended at any of their flushes."""

import errno
import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from tests.api.harness import serving
from tests.commands.test_backup import saved
from tinkercloud import flushing
from tinkercloud.errors import UserError
from tinkercloud.services.checkpoints import backups
from tinkercloud.storage.database_file import DATABASE_NAME


class Ended(BaseException):
    """The process is no more."""


class Flushes:
    """last: how many there may be; None: no limit. paths: of those since `begin`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._plain = flushing.flush
        monkeypatch.setattr(flushing, "flush", self._flush)
        self.begin(None)

    def begin(self, last: int | None) -> None:
        self._last, self.paths = last, list[Path]()

    def _flush(self, path: Path) -> None:
        self._plain(path)
        self.paths.append(path)
        if len(self.paths) == self._last:
            raise Ended


async def test_a_backup_or_a_restored_folder_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, folder, restored = (tmp_path / name for name in ("data", "backup", "restored"))
    async with serving(data) as api:
        await saved(api, "one")
    flushes = Flushes(monkeypatch)
    for last in count(1):
        flushes.begin(last)
        try:
            backups.back_up(data, folder, lambda text: None)
            break
        except Ended:
            # its name comes with the last one
            assert folder.exists() == (flushes.paths[-1] == tmp_path)
            shutil.rmtree(folder, ignore_errors=True)
    assert last > 4
    for last in count(1):
        shutil.rmtree(restored, ignore_errors=True)
        flushes.begin(last)
        try:
            assert backups.restore(folder, restored, lambda text: None).num_checkpoints == 1
            break
        except Ended:
            is_named = (restored / DATABASE_NAME).exists()
            assert is_named == (flushes.paths[-2:] == [restored / f".{DATABASE_NAME}", restored])
    assert last > 4


async def test_folders_that_are_made_for_it_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that no flush of its folder followed may be gone after a power cut."""
    async with serving(tmp_path / "data"):
        pass
    flushes = Flushes(monkeypatch)
    folder, restored = tmp_path / "a" / "b" / "backup", tmp_path / "c" / "d" / "data"
    backups.back_up(tmp_path / "data", folder, lambda text: None)
    assert {tmp_path, folder.parents[1], folder.parent} <= set(flushes.paths)
    flushes.begin(None)
    backups.restore(folder, restored, lambda text: None)
    assert {tmp_path, restored.parents[1], restored.parent, restored} <= set(flushes.paths)


async def test_a_full_disk_is_said_in_a_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any file: they can be made again once there is room."""
    data, folder, restored = (tmp_path / name for name in ("data", "backup", "restored"))
    async with serving(data) as api:
        await saved(api, "one")
    disk = FullDisk(monkeypatch)

    def refused(make: Callable[[], object]) -> int:
        """How many times, one file later each."""
        held = sorted(tmp_path.iterdir())
        for room in count():
            disk.room = room
            try:
                make()
            except UserError as error:
                assert "No space left on device" in str(error)
                assert "cannot be made, and nothing is left of it" in str(error)
                assert sorted(tmp_path.iterdir()) == held
            else:
                return room
        raise AssertionError

    assert refused(lambda: backups.back_up(data, folder, lambda text: None)) > 1
    assert refused(lambda: backups.restore(folder, restored, lambda text: None)) > 2


class FullDisk:
    """room: for so many files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.room = 0
        for name in ("copy2", "copyfile"):
            monkeypatch.setattr(shutil, name, self._copy(getattr(shutil, name)))

    def _copy(self, plain: Callable[..., object]) -> Callable[..., object]:
        def copy(source: str, target: str, **options: bool) -> object:
            self.room -= 1
            if self.room < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)
            return plain(source, target, **options)

        return copy
