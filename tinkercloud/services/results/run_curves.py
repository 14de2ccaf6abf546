"""What a run's operations reported, a point for each step of the optimizer: loss, KL, entropy, ...

Read from the results that the client got, so that a curve goes on over restarts and costs nothing
while nobody looks.
"""

import asyncio
import json
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinkercloud.services.recovery.lane_operations import FORWARD_BACKWARD, OPTIM_STEP
from tinkercloud.storage.finished_results import FinishedResults, LaneResult
from tinkercloud.wire.codec import decode_train_output

Metrics = dict[str, float]
MAX_CURVES = 32  # that are remembered; others are read anew
MAX_POINTS = 20_000  # of a curve, the newest
PAGE = 64  # operations read at once: a result may have megabytes
KINDS = {FORWARD_BACKWARD, OPTIM_STEP}


@dataclass(slots=True)
class Totals:
    """Metrics of several passes as of one; the suffix of a name says how they are reduced. What is
    neither a sum nor an extreme is a mean over datums."""

    num_datums: int = 0
    metrics: Metrics = field(default_factory=dict[str, float])

    def add(self, metrics: Mapping[str, float], num_datums: int) -> None:
        total = self.num_datums + num_datums
        for name, value in metrics.items():
            before = self.metrics.get(name)
            self.metrics[name] = (
                value if before is None else self._reduced(name, before, value, num_datums)
            )
        self.num_datums = total

    def _reduced(self, name: str, before: float, value: float, num_datums: int) -> float:
        match name.rpartition(":")[2]:
            case "sum":
                return before + value
            case "max":
                return max(before, value)
            case "min":
                return min(before, value)
            case _:
                pass
        total = self.num_datums + num_datums
        return (before * self.num_datums + value * num_datums) / total if total else value


@dataclass(frozen=True, slots=True)
class Point:
    """step: the how-manieth of those that are kept, from 1. finished_at: in seconds since the
    epoch."""

    step: int
    seq_id: int
    finished_at: float
    metrics: Metrics

    def described(self) -> dict[str, Any]:
        finite = {name: v for name, v in self.metrics.items() if math.isfinite(v)}
        return {
            "step": self.step,
            "seq_id": self.seq_id,
            "finished_at": self.finished_at,
            "metrics": finite,
        }


@dataclass(slots=True)
class _Curve:
    """seq_id: of the last operation in it. underway: of passes since the last step."""

    seq_id: int = -1
    num_steps: int = 0
    points: list[Point] = field(default_factory=list[Point])
    underway: Totals = field(default_factory=Totals)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def add(self, result: LaneResult, metrics: Metrics, num_datums: int) -> None:
        self.seq_id = result.seq_id
        if result.kind == FORWARD_BACKWARD:
            self.underway.add(metrics, num_datums)
        elif result.kind == OPTIM_STEP and result.body:
            assert result.finished_at is not None
            self.num_steps += 1
            merged = {**self.underway.metrics, **metrics}
            self.points.append(Point(self.num_steps, result.seq_id, result.finished_at, merged))
            self.underway = Totals()
            del self.points[:-MAX_POINTS]


class RunCurves:
    def __init__(self, results: FinishedResults):
        self._results = results
        self._curves: OrderedDict[tuple[str, str], _Curve] = OrderedDict()

    async def points(self, user: str, model_id: str, after_step: int = 0) -> list[Point]:
        """Of the user's run, those after a step; none of an unknown one."""
        curve = self._curves.setdefault((user, model_id), _Curve())
        self._curves.move_to_end((user, model_id))
        while len(self._curves) > MAX_CURVES:
            self._curves.popitem(last=False)
        async with curve.lock:
            while await self._read_on(user, model_id, curve):
                pass
        return [point for point in curve.points if point.step > after_step]

    async def _read_on(self, user: str, model_id: str, curve: _Curve) -> bool:
        """Whether there may be more."""
        results = await self._results.of_model(user, model_id, KINDS, curve.seq_id, PAGE)
        for result in results:
            if result.status == "pending":  # later ones are read when it has ended
                return False
            curve.add(result, *await asyncio.to_thread(_metrics_of, result))
        return len(results) == PAGE


def _metrics_of(result: LaneResult) -> tuple[Metrics, int]:
    """(metrics, number of datums)"""
    if not result.body:
        return {}, 0
    if result.kind == OPTIM_STEP:
        return json.loads(result.body)["metrics"], 0
    output = decode_train_output(result.body)
    return dict(output.metrics), len(output.outputs)
