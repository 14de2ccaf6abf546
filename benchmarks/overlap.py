"""How long two streams of a device were busy at once, by a profiler's trace."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

MARK = "lane "  # what a lane's sections are named in a trace, before the lane's own name
LAUNCHES = ("cuda_runtime", "cuda_driver")


class Interval(NamedTuple):
    """In which a stream was busy, in microseconds; end is not part of it."""

    stream: Hashable
    start: float
    end: float


class Span(NamedTuple):
    start: float
    end: float


def spans(intervals: Iterable[Interval], stream: Hashable) -> list[Span]:
    """When the stream was busy: in order, without overlap among themselves."""
    merged: list[Span] = []
    of_stream = [each for each in intervals if each.stream == stream and each.end > each.start]
    for _, start, end in sorted(of_stream, key=lambda interval: interval.start):
        if merged and start <= merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(end, merged[-1].end))
        else:
            merged.append(Span(start, end))
    return merged


def busy(intervals: Iterable[Interval], stream: Hashable) -> float:
    """Microseconds in which the stream computed."""
    return sum(span.end - span.start for span in spans(intervals, stream))


def overlap(intervals: Sequence[Interval], first: Hashable, second: Hashable) -> float:
    """Microseconds in which both streams computed, by a sweep over all beginnings and ends."""
    edges: list[tuple[float, int]] = []
    for stream in (first, second):
        for span in spans(intervals, stream):
            edges += [(span.start, 1), (span.end, -1)]
    edges.sort()
    total, depth = 0.0, 0
    for (at, step), (following, _) in pairwise(edges):
        depth += step
        total += following - at if depth == 2 else 0.0
    return total


@dataclass(frozen=True)
class LaneKernels:
    """Kernels by lane, and on which of the device's streams each lane's ran."""

    intervals: list[Interval]
    streams: dict[str, set[int]]


def lane_kernels(trace: Mapping[str, Any]) -> LaneKernels:
    """Of a Chrome trace by torch.profiler in which lanes' sections are marked. A kernel is of the
    lane in whose section it was launched; others are left out."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    sections = _sections(events)
    lanes: dict[int, str] = {}  # by the number that a launch and its kernels share
    for event in events:
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {}):
            lane = _lane_at(sections, event)
            if lane is not None:
                lanes[event["args"]["correlation"]] = lane
    kernels = LaneKernels([], {})
    for event in events:
        args = event.get("args", {})
        if event.get("cat") == "kernel" and args.get("correlation") in lanes:
            lane = lanes[args["correlation"]]
            kernels.intervals.append(Interval(lane, event["ts"], event["ts"] + event["dur"]))
            kernels.streams.setdefault(lane, set()).add(args["stream"])
    return kernels


def _sections(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, int, Span]]:
    """Lane, thread and time of each; on the host."""
    return [
        (event["name"][len(MARK) :], event["tid"], Span(event["ts"], event["ts"] + event["dur"]))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(MARK)
    ]


def _lane_at(sections: Iterable[tuple[str, int, Span]], launch: Mapping[str, Any]) -> str | None:
    at, thread = launch["ts"], launch["tid"]
    inside = (lane for lane, tid, span in sections if tid == thread and span.start <= at < span.end)
    return next(inside, None)
