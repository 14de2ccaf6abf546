"""What each side of the pipeline did when, as a trace that browsers show (chrome://tracing)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Span:
    """In seconds of `time.monotonic`, a clock that all processes of a machine share."""

    name: str
    start_s: float
    end_s: float


def within(spans: Sequence[Span], start_s: float, end_s: float) -> list[Span]:
    return [span for span in spans if start_s <= span.start_s and span.end_s <= end_s]


def write_trace(path: Path, lanes: Mapping[str, Mapping[str, Sequence[Span]]]) -> None:
    """In the Trace Event Format. lanes: by run and lane; each run begins at 0."""
    events: list[dict[str, object]] = []
    for process, (run, by_lane) in enumerate(lanes.items(), 1):
        events.append(_name("process_name", run, process, 0))
        first_s = min(span.start_s for spans in by_lane.values() for span in spans)
        for thread, (lane, spans) in enumerate(by_lane.items(), 1):
            events.append(_name("thread_name", lane, process, thread))
            events += [
                {
                    "name": span.name, "ph": "X", "pid": process, "tid": thread,
                    "ts": round(1e6 * (span.start_s - first_s), 1),
                    "dur": round(1e6 * (span.end_s - span.start_s), 1),
                }
                for span in spans
            ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _name(kind: str, name: str, process: int, thread: int) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
