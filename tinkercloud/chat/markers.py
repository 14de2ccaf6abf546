"""Texts that are looked for in a stream, and may come in pieces."""

from collections.abc import Sequence


def held_back(text: str, markers: Sequence[str]) -> int:
    """How many of the last characters may be the beginning of a marker, and must wait for what
    follows. Whole markers are the caller's to find."""
    longest = max((len(marker) - 1 for marker in markers), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(len(marker) > length and marker.startswith(end) for marker in markers):
            return length
    return 0
