"""Bodies in zstd's format, for servers that want their training data so."""

import importlib
import struct

MAGIC = 0xFD2FB528
MAX_BLOCK_BYTES = 128 * 1024  # RFC 8878, section 3.1.1.2.3


def zstd_frame(body: bytes) -> bytes:
    """A zstd frame of the body: compressed where the package zstandard is installed, of stored
    blocks where it is not. A client must not need more packages for it."""
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        return stored_frame(body)
    return zstandard.ZstdCompressor().compress(body)


def stored_frame(body: bytes) -> bytes:
    """A frame of raw blocks (RFC 8878, sections 3.1.1.1 and 3.1.1.2)."""
    single_segment, size_of_eight_bytes = 1 << 5, 3 << 6
    header = struct.pack("<IBQ", MAGIC, single_segment | size_of_eight_bytes, len(body))
    starts = range(0, max(len(body), 1), MAX_BLOCK_BYTES)
    blocks = [body[start : start + MAX_BLOCK_BYTES] for start in starts]
    parts = [header]
    for index, block in enumerate(blocks):
        is_last = index == len(blocks) - 1
        parts += [struct.pack("<I", len(block) << 3 | is_last)[:3], block]
    return b"".join(parts)
