"""What a file is, by the SHA-256 of each of its pieces."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinkercloud.errors import ConfigError

PIECE_BYTES = 8 * 2**20
MAX_PIECES = 2**20
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ -]{0,200}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """pieces: their digests; all but the last are piece_bytes long."""

    name: str
    num_bytes: int
    piece_bytes: int
    pieces: tuple[str, ...]

    @property
    def num_pieces(self) -> int:
        return len(self.pieces)

    @property
    def digest(self) -> str:
        """Of the manifest, and so of the file."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def span(self, index: int) -> tuple[int, int]:
        """Offset and length of a piece."""
        offset = index * self.piece_bytes
        return offset, min(self.piece_bytes, self.num_bytes - offset)

    def holds(self, index: int, data: bytes) -> bool:
        return hashlib.sha256(data).hexdigest() == self.pieces[index]

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def make_manifest(
    path: Path, piece_bytes: int = PIECE_BYTES, report: Callable[[str], None] = lambda _: None
) -> Manifest:
    """Reads the whole file. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    num_bytes, pieces = path.stat().st_size, []
    if not num_bytes:
        raise ConfigError(f"{path} is empty")
    with path.open("rb") as file:
        while data := file.read(piece_bytes):
            pieces.append(hashlib.sha256(data).hexdigest())
            if len(pieces) % 128 == 0:
                report(f"read {file.tell() / 1e9:.1f} of {num_bytes / 1e9:.1f} GB")
    return Manifest(path.name, num_bytes, piece_bytes, tuple(pieces))


def parse_manifest(text: str | bytes) -> Manifest:
    """Of what a peer sent: the name stays in its folder, the counts are those of the pieces. Raises
    ConfigError."""
    try:
        values: dict[str, Any] = json.loads(text)
        manifest = Manifest(
            str(values["name"]),
            int(values["num_bytes"]),
            int(values["piece_bytes"]),
            tuple(map(str, values["pieces"])),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"a peer sent no manifest: {error}") from None
    sizes = manifest.num_bytes > 0 and 0 < manifest.piece_bytes <= 64 * PIECE_BYTES
    if not sizes or not 0 < manifest.num_pieces <= MAX_PIECES:
        raise ConfigError("a peer sent a manifest with impossible sizes")
    if manifest.num_pieces != -(-manifest.num_bytes // manifest.piece_bytes):
        raise ConfigError("a peer sent a manifest whose pieces do not make up its size")
    if not _NAME.fullmatch(manifest.name) or not all(map(_DIGEST.fullmatch, manifest.pieces)):
        raise ConfigError("a peer sent a manifest with an impossible name or digest")
    return manifest
