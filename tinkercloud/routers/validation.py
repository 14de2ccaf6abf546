"""Faults of a request's shape, in one readable line."""

from collections.abc import Mapping, Sequence
from typing import Any

MAX_FAULTS = 5


def readable(errors: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong and where; values are left out, they may be large or secret."""
    faults = [
        f"{'.'.join(str(part) for part in error['loc']) or 'body'}: {error['msg']}"
        for error in errors[:MAX_FAULTS]
    ]
    more = len(errors) - MAX_FAULTS
    return "; ".join(faults) + (f"; and {more} more" if more > 0 else "")
