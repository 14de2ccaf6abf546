"""What two sequences have in common from their start on."""

from collections.abc import Iterable
from itertools import takewhile
from operator import eq


def num_equal(first: Iterable[object], second: Iterable[object]) -> int:
    """How many elements they begin with alike."""
    return sum(1 for _ in takewhile(bool, map(eq, first, second)))
