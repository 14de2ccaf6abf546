"""Freed memory back to the system.

The C library keeps freed pieces for later ones: what a large model leaves behind would count as the
process's until it ends, and other processes could not have it.
"""

import ctypes
from collections.abc import Callable


def _find_trim() -> Callable[[int], int] | None:
    """None: this C library has none (musl's, macOS's)."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None


_trim = _find_trim()


def give_back() -> None:
    """All that is free. Later allocations get new pages, which takes them longer: this is for when
    something large has gone, not for every step."""
    if _trim is not None:
        _trim(0)
