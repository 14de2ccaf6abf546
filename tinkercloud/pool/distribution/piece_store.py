"""A file on this machine, whole or in part, piece by piece."""

import os
import threading
from pathlib import Path

from tinkercloud.errors import ConfigError
from tinkercloud.pool.distribution.manifest import Manifest


class PieceStore:
    """Of the file `path`; until it is whole, of `path`.part, whose pieces that are right already
    are found by their digests. Safe from any thread. Raises ConfigError where `path` is there, and
    another file."""

    def __init__(self, path: Path, manifest: Manifest):
        self.manifest = manifest
        self.path = path
        self._part = path.with_name(f"{path.name}.part")
        self._lock = threading.Lock()
        place = path if path.is_file() else self._part
        is_new = not place.is_file()
        place.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(place, os.O_RDWR | os.O_CREAT, 0o644)
        self._have: set[int] = set()
        if not is_new:
            self._have = {n for n in range(manifest.num_pieces) if self._is_right(n)}
        if len(self._have) < manifest.num_pieces:
            if place == path:
                os.close(self._file)
                raise ConfigError(f"{path} is there already, and another file; move it away")
            os.ftruncate(self._file, manifest.num_bytes)
        elif place == self._part:
            self._finish()

    @property
    def have(self) -> frozenset[int]:
        with self._lock:
            return frozenset(self._have)

    @property
    def is_whole(self) -> bool:
        return len(self.have) == self.manifest.num_pieces

    def read(self, index: int) -> bytes | None:
        """None where the piece is not here."""
        with self._lock:
            if index not in self._have:
                return None
        offset, length = self.manifest.span(index)
        return os.pread(self._file, length, offset)

    def write(self, index: int, data: bytes) -> bool:
        """False, and nothing is written, where it is not that piece."""
        if not self.manifest.holds(index, data):
            return False
        os.pwrite(self._file, data, self.manifest.span(index)[0])
        with self._lock:
            was_whole = len(self._have) == self.manifest.num_pieces
            self._have.add(index)
            if not was_whole and len(self._have) == self.manifest.num_pieces:
                self._finish()
        return True

    def close(self) -> None:
        os.close(self._file)

    def _is_right(self, index: int) -> bool:
        offset, length = self.manifest.span(index)
        return self.manifest.holds(index, os.pread(self._file, length, offset))

    def _finish(self) -> None:
        os.ftruncate(self._file, self.manifest.num_bytes)
        os.fsync(self._file)
        os.replace(self._part, self.path)
