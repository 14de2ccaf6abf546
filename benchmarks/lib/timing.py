"""Taking times on a machine that is faster in one minute than in the next."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar

import numpy as np

T = TypeVar("T")


def alternating(contenders: Sequence[T], repeats: int) -> Iterator[tuple[int, T]]:
    """Number of the repeat and contender: all of them once, then all of them again, so that no slow
    minute of the machine is one contender's alone."""
    for repeat in range(repeats):
        for contender in contenders:
            yield repeat, contender


def best_s(work: Callable[[], object], seconds: float) -> float:
    """The shortest of at least three runs, after one that warms up."""
    work()
    best, count, deadline = float("inf"), 0, time.perf_counter() + seconds
    while count < 3 or time.perf_counter() < deadline:
        start = time.perf_counter()
        work()
        best, count = min(best, time.perf_counter() - start), count + 1
    return best


def quantile(
    values: Sequence[float] | np.ndarray,
    share: float,
    method: Literal["linear", "nearest"] = "linear",
) -> float:
    """Not a number where there are no values."""
    return float(np.quantile(values, share, method=method)) if len(values) else float("nan")
