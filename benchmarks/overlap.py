"""How long two streams of a device were busy at once, by a profiler's trace."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

MARK = "role "  # what the sections of a stream's role are named in a trace, before its own name
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
class RoleKernels:
    """Kernels by the role of their stream, and the device's streams of each role."""

    intervals: list[Interval]
    streams: dict[str, set[int]]


def role_kernels(trace: Mapping[str, Any]) -> RoleKernels:
    """Of a Chrome trace by torch.profiler in which the sections of roles are marked. A kernel is of
    the role in whose section it was launched; others are left out."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    sections = _sections(events)
    roles: dict[int, str] = {}  # by the number that a launch and its kernels share
    for event in events:
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {}):
            role = _role_at(sections, event)
            if role is not None:
                roles[event["args"]["correlation"]] = role
    kernels = RoleKernels([], {})
    for event in events:
        args = event.get("args", {})
        if event.get("cat") == "kernel" and args.get("correlation") in roles:
            role = roles[args["correlation"]]
            kernels.intervals.append(Interval(role, event["ts"], event["ts"] + event["dur"]))
            kernels.streams.setdefault(role, set()).add(args["stream"])
    return kernels


def _sections(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, int, Span]]:
    """Lane, thread and time of each; on the host."""
    return [
        (event["name"][len(MARK) :], event["tid"], Span(event["ts"], event["ts"] + event["dur"]))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(MARK)
    ]


def _role_at(sections: Iterable[tuple[str, int, Span]], launch: Mapping[str, Any]) -> str | None:
    at, thread = launch["ts"], launch["tid"]
    inside = (role for role, tid, span in sections if tid == thread and span.start <= at < span.end)
    return next(inside, None)
