"""Compressed bodies, a bounded piece at a time."""

import zlib
from collections.abc import Callable
from typing import Protocol

import zstandard

from tinkercloud.errors import UserError

STEP_BYTES = 4 * 1024 * 1024
"""The most that one step inflates to."""
MAX_WINDOW_BYTES = 8 * 1024 * 1024
"""Of zstd frames: RFC 9659 allows no larger ones in HTTP. Encoders need them from level 20 on."""

# Four bytes of zstd can stand for a block of 128 kB (RFC 8878, section 3.1.1.2), so that a slice of
# this length inflates to half a step at most. gzip inflates 1032 times at most.
_SLICE_BYTES = 4 * (STEP_BYTES // 2 // (128 * 1024) - 1)


class _Stream(Protocol):
    def decompress(self, data: bytes, /) -> bytes: ...

    @property
    def eof(self) -> bool: ...


def _gzip() -> _Stream:
    return zlib.decompressobj(wbits=31)


def _zstd() -> _Stream:
    return zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()


_STREAMS: dict[str, Callable[[], _Stream]] = {"gzip": _gzip, "zstd": _zstd}


class Inflater:
    """A stream of one content encoding; UserError for others, and for bytes that are none."""

    def __init__(self, encoding: str):
        stream = _STREAMS.get(encoding)
        if stream is None:
            raise UserError(f"content encoding {encoding!r} is not taken; send zstd or gzip")
        self._stream = stream()
        self._input = b""
        self._position = 0

    def feed(self, piece: bytes) -> None:
        assert not self.has_input, "the last piece is not done"
        self._input, self._position = piece, 0

    @property
    def has_input(self) -> bool:
        """False at the end of the stream, whatever follows there."""
        return self._position < len(self._input) and not self._stream.eof

    @property
    def is_complete(self) -> bool:
        return self._stream.eof

    def step(self) -> bytes:
        """At most STEP_BYTES of what was fed, inflated."""
        pieces: list[bytes] = []
        room = STEP_BYTES
        try:
            while self.has_input and room >= STEP_BYTES // 2:
                end = self._position + _SLICE_BYTES
                pieces.append(self._stream.decompress(self._input[self._position : end]))
                room -= len(pieces[-1])
                self._position = end
        except (zlib.error, zstandard.ZstdError) as error:
            raise UserError(f"the compressed body cannot be read: {error}") from None
        return b"".join(pieces)
