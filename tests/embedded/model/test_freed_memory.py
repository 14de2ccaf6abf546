"""Freed memory goes back to the system, also where something between is still in use."""

import pytest

from tests.peak_memory import resident_bytes
from tinkercloud.embedded.model import freed_memory

PIECE = 64 * 1024  # small enough for the C library to keep
NUM_PIECES = 2000


@pytest.mark.skipif(freed_memory._trim is None, reason="this C library gives nothing back")
def test_what_is_freed_between_pieces_in_use_is_given_back() -> None:
    pieces = [bytearray(PIECE) for _ in range(NUM_PIECES)]
    for piece in pieces:
        piece[::4096] = b"\1" * (PIECE // 4096)
    kept = pieces[-1]  # the end of the heap cannot move past it
    del piece
    pieces.clear()
    before = resident_bytes("VmRSS")
    freed_memory.give_back()
    assert before - resident_bytes("VmRSS") > NUM_PIECES * PIECE / 2
    assert len(kept) == PIECE
