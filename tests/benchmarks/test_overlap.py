"""How long streams computed at once, against a count of every microsecond."""

import numpy as np
import pytest

from benchmarks.overlap import Interval, busy, overlap, role_kernels

LENGTH = 400


def every_microsecond(intervals: list[Interval], stream: int) -> np.ndarray:
    """Whether the stream was busy in each, bool (LENGTH,)."""
    found = np.zeros(LENGTH, bool)
    for own, start, end in intervals:
        if own == stream:
            found[int(start) : int(end)] = True
    return found


def drawn(seed: int) -> list[Interval]:
    """Intervals of three streams: some empty, some touching, some inside others."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(int(generator.integers(0, 40))):
        start = int(generator.integers(0, LENGTH - 40))
        length = int(generator.integers(0, 40))
        found.append(Interval(int(generator.integers(0, 3)), float(start), float(start + length)))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_overlap_is_the_number_of_microseconds_in_which_both_are_busy(seed: int):
    intervals = drawn(seed)
    first, second = (every_microsecond(intervals, stream) for stream in (0, 1))
    assert busy(intervals, 0) == first.sum()
    assert overlap(intervals, 0, 1) == overlap(intervals, 1, 0) == (first & second).sum()
    assert overlap(intervals, 0, 0) == busy(intervals, 0)


def test_streams_that_follow_each_other_do_not_overlap():
    intervals = [Interval("a", 0.0, 5.0), Interval("b", 5.0, 9.0), Interval("a", 9.0, 9.5)]
    assert overlap(intervals, "a", "b") == 0
    assert busy(intervals, "a") == 5.5
    assert overlap([], "a", "b") == busy([], "a") == 0


# ---- of a trace


def section(role: str, start: float, end: float, tid: int = 1) -> dict:
    return {
        "ph": "X", "cat": "user_annotation", "name": f"role {role}", "tid": tid, "ts": start,
        "dur": end - start,
    }  # fmt: skip


def launch(number: int, at: float, tid: int = 1, cat: str = "cuda_runtime") -> dict:
    args = {"correlation": number}
    return {"ph": "X", "cat": cat, "name": "launch", "tid": tid, "ts": at, "dur": 1, "args": args}


def kernel(number: int, start: float, end: float, stream: int) -> dict:
    args = {"correlation": number, "stream": stream}
    return {
        "ph": "X", "cat": "kernel", "name": "gemm", "tid": stream, "ts": start,
        "dur": end - start, "args": args,
    }  # fmt: skip


def test_a_kernel_is_of_the_role_in_whose_section_it_was_launched():
    events = [
        section("prefill", 0, 10),
        section("verify", 20, 30),
        launch(1, 2),
        launch(2, 21, cat="cuda_driver"),
        launch(3, 22),  # a graph: several kernels
        launch(4, 15),  # between sections
        launch(5, 21, tid=2),  # another thread's
        kernel(1, 5, 50, 7),
        kernel(2, 25, 30, 9),
        kernel(3, 31, 33, 9),
        kernel(3, 49, 60, 9),
        kernel(4, 0, 99, 3),
        kernel(5, 0, 99, 3),
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "cat": "cpu_op", "name": "role of nothing", "tid": 1, "ts": 0, "dur": 99},
    ]
    found = role_kernels({"traceEvents": events})
    assert found.streams == {"prefill": {7}, "verify": {9}}
    assert busy(found.intervals, "prefill") == 45
    assert busy(found.intervals, "verify") == 18
    assert overlap(found.intervals, "prefill", "verify") == 8
