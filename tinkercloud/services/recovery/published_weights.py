"""The files of published weights, within their bound.

A client that publishes at every step and names none of it leaves files for each sampler of its
session. Where all have more bytes than configured, those that were sampled longest ago go; their
samplers say so.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from tinkercloud.errors import TinkercloudError, VersionLost
from tinkercloud.services.recovery.recovery_files import RecoveryFiles
from tinkercloud.services.recovery.version_store import VersionStore
from tinkercloud.storage.journal import JournalStorage

T = TypeVar("T")
logger = logging.getLogger(__name__)

SPARED_S = 600.0
"""After its last use nothing goes: its client may still be about to sample it."""


class PublishedWeights:
    def __init__(
        self,
        journal: JournalStorage,
        versions: VersionStore,
        files: RecoveryFiles,
        max_bytes: int,
    ):
        self._journal = journal
        self._versions = versions
        self._files = files
        self._max_bytes = max_bytes

    async def find(self, user: str, version_key: str) -> Path | None:
        """The folder of a checkpoint with the weights of a published version, to be used now."""
        directory = await self._journal.version_directory(user, version_key)
        while directory is not None:
            folder = self._files.data_dir / directory
            try:
                await asyncio.to_thread(_touch, folder)
            except FileNotFoundError:
                looked_at = directory
                directory = await self._journal.version_directory(user, version_key)
                if directory == looked_at:
                    raise
            else:
                return folder
        return None

    async def read(
        self, user: str, version_key: str, folder: Path, read: Callable[[Path], Awaitable[T]]
    ) -> T:
        """What `read` makes of the folder, as `find` gave it. Where the version has been written
        anew since, the older files are gone, and the newer ones are read. Raises VersionLost where
        it is not kept any more: its session has ended meanwhile, say."""
        while True:
            try:
                return await read(folder)
            except (OSError, TinkercloudError) as error:
                newer = await self.find(user, version_key)
                if newer is None and isinstance(error, FileNotFoundError):
                    raise VersionLost(version_key) from error
                if newer is None or newer == folder:
                    raise
                folder = newer

    async def keep_within(self) -> None:
        """What is in the backend's memory stays: it was used a short while ago."""
        kept = await self._journal.kept_versions()
        folders = [self._files.data_dir / each.directory for each in kept]
        sizes, used_at = await asyncio.to_thread(_measured, folders)
        too_much, before = sum(sizes) - self._max_bytes, time.time() - SPARED_S
        oldest_first = sorted(zip(used_at, sizes, kept, strict=True), key=lambda row: row[0])
        for at, size, each in oldest_first:
            if too_much <= 0 or at > before:
                return
            if self._versions.find(each.key) is not None:
                continue
            await self._journal.drop_version(each)
            await self._files.remove(self._files.data_dir / each.directory)
            logger.warning("the weights of %s went: published_bytes", each.key)
            too_much -= size


def _touch(folder: Path) -> None:
    os.utime(folder)


def _measured(folders: list[Path]) -> tuple[list[int], list[float]]:
    """Their sizes in bytes, and when they were used last, in seconds since the epoch."""
    sizes = [sum(file.stat().st_size for file in each.glob("*")) for each in folders]
    return sizes, [each.stat().st_mtime if each.exists() else 0.0 for each in folders]
