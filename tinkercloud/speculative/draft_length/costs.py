"""What a round costs: milliseconds of the target's forward and of the drafter.

The target's time is a curve over rows, one for plain rounds (a row for each sequence, which a GPU
may replay as a graph) and one for rounds that verify, plus what attention adds for each token of
context, by row and by sequence. Measured at the start, then kept right by the rounds themselves.

A shared machine is twice as slow in one minute as in the next, so a time alone says little. Two
things are learned from it, apart. *Slowdown*: how much slower than measured everything is at
present, one number. *Shape*: where two rounds that follow one another have different rows, the
ratio of their times, in which the slowdown cancels, moves the curve at both places towards it, by a
small step of a clipped error (as Elo ratings are learned from games). Rounds of one size alone say
nothing of the shape and leave it.

A round asks for a few single times and teaches one: those are computed on lists, which for sixteen
points takes a quarter of what arrays do while a pass has every cache.

Axes: G points of the grid.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
N = TypeVar("N", float, Array)
Point = tuple[int, int, int]
Measure = Callable[[int, int, int], float]
"""(rows, sequences, context) -> milliseconds of a whole round but for the drafting."""

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
PLAIN, VERIFY = 0, 1
VERIFY_ROWS = 4  # rows for each sequence, where verifying is measured
PASSES = 6  # the median counts: a slow moment of the machine is no cost of a round
CONTEXT_ROWS = 16  # of the rounds that say what attention over the context adds
SHORT, LONG = 64, 512  # contexts in tokens
LEAST_SHARE = 0.2  # of a measured time that is not attention, whatever the noise says
# Steps are shares of an error in the logarithm of a time. They shrink as 1 / (trust + rounds seen),
# as a mean does, down to a least step that lets the curve follow a machine that changes.
TRUST = 8  # rounds that the measurement at the start is worth
LEAST_STEP = 0.02
NEIGHBOUR = 0.5  # what a point of the grid learns from one at the next point
LEVEL_TRUST, LEAST_LEVEL_STEP = 3, 0.05  # of all verifying rounds against plain ones
SLOWDOWN_STEP = 0.1
MAX_ERROR = log(2.0)  # of one round: a spike says no more than that


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """plain_ms, verify_ms: at each of `rows`, (G,), without attention over the context, which adds
    row_context_ms for each row and token of context, sequence_context_ms for each sequence."""

    rows: tuple[int, ...]
    plain_ms: tuple[float, ...]
    verify_ms: tuple[float, ...]
    row_context_ms: float = 0.0
    sequence_context_ms: float = 0.0


def measure_costs(
    measure: Measure,
    rows: Sequence[int] = ROWS,
    num_passes: int = PASSES,
) -> MeasuredCosts:
    """The whole grid, `num_passes` times over, each point between two of one row.

    A point's time is the median of its ratios to these, in which a slow minute cancels.
    """
    points = [(r, r, SHORT) for r in rows] + [(r, _sequences(r), SHORT) for r in rows]
    probe = min(rows[-1], CONTEXT_ROWS)
    points += [(probe, probe, LONG), (probe, _sequences(probe), LONG)]
    typical = _typical(measure, points, num_passes)
    by_row, by_sequence = _slopes(typical, probe)

    def without_attention(row: int, sequences: int) -> float:
        whole = typical[row, sequences, SHORT]
        attention = (by_row * row + by_sequence * sequences) * SHORT
        return max(whole - attention, LEAST_SHARE * whole)

    plain = tuple(without_attention(r, r) for r in rows)
    verify = tuple(without_attention(r, _sequences(r)) for r in rows)
    return MeasuredCosts(tuple(rows), plain, verify, by_row, by_sequence)


def _typical(measure: Measure, points: Sequence[Point], num_passes: int) -> dict[Point, float]:
    reference = (1, 1, SHORT)
    references = [measure(*reference)]
    ratios: dict[Point, list[float]] = {point: [] for point in points}
    for _ in range(num_passes):
        for point in points:
            ms = measure(*point)
            references.append(measure(*reference))
            ratios[point].append(2 * ms / (references[-2] + references[-1]))
    return {p: float(np.median(values) * np.median(references)) for p, values in ratios.items()}


def _sequences(rows: int) -> int:
    return max(1, rows // VERIFY_ROWS)


def _slopes(ms: Mapping[Point, float], rows: int) -> tuple[float, float]:
    """Milliseconds that a token of context adds, by row and by sequence."""
    few = _sequences(rows)
    plain = (ms[rows, rows, LONG] - ms[rows, rows, SHORT]) / (LONG - SHORT)
    verify = (ms[rows, few, LONG] - ms[rows, few, SHORT]) / (LONG - SHORT)
    by_sequence = max(0.0, (plain - verify) / (rows - few)) if rows > few else 0.0
    return max(0.0, plain / rows - by_sequence), by_sequence


class CostTable:
    """The target's milliseconds, never falling with rows. Deterministic: times are handed in."""

    def __init__(self, start: MeasuredCosts) -> None:
        self._start = start
        self._grid = np.array(start.rows, np.float64)
        self._log_slowdown = 0.0
        self.doubt()

    def plain_ms(self, sequences: int, context: float) -> float:
        return self._ms_of(PLAIN, sequences, sequences, context)

    def verify_ms(self, rows: Array, sequences: int, context: float) -> Array:
        """rows (N,), fractions too; where there are no more than sequences, a plain round's.

        Never less than that: noise must not promise that drafts save time where none is accepted.
        """
        without_attention = interpolated(self._grid, self._verify_curve, rows)
        verify = self._with_attention(without_attention, rows, sequences, context)
        plain_ms = self.plain_ms(sequences, context)
        return np.where(rows > sequences, np.maximum(verify, plain_ms), plain_ms)

    @property
    def slowdown(self) -> float:
        """How many times slower than at the start everything is."""
        return exp(self._log_slowdown)

    def observe(
        self, rows: int, sequences: int, context: float, ms: float, *, num_rounds: int = 1
    ) -> float:
        """So many rounds took `ms` each, their drafting apart. How many times slower than at the
        start they were."""
        if ms <= 0:
            return self.slowdown
        kind = VERIFY if rows > sequences else PLAIN
        error = log(ms / self._ms_of(kind, rows, sequences, context))
        here = place(self._start.rows, rows)
        slower = error + self._log_slowdown  # than the table without its slowdown
        if self._last is not None and self._last[:2] != (kind, here):
            self._compare(self._last, (kind, here, slower))
            error = log(ms / self._ms_of(kind, rows, sequences, context))
        self._log_slowdown += (1.0 - (1.0 - SLOWDOWN_STEP) ** num_rounds) * _clipped(error)
        self._last = (kind, here, slower)
        return exp(slower)

    def doubt(self) -> None:
        """Back to what was measured, and ready to learn: a slow minute may have taught the wrong
        shape, and where nothing is drafted no round corrects it."""
        num = len(self._grid)
        self._shape, self._visits = ([0.0] * num, [0.0] * num), ([0.0] * num, [0.0] * num)
        self._num_crossed = 0
        self._last: tuple[int, float, float] | None = None
        self._curves = [self._fitted(kind) for kind in (PLAIN, VERIFY)]
        self._verify_curve = np.array(self._curves[VERIFY])

    def _compare(self, before: tuple[int, float, float], now: tuple[int, float, float]) -> None:
        """Both places move, each by its own step, until the ratio is the one that was seen."""
        error = _clipped(now[2] - before[2])
        if before[0] != now[0]:
            self._level(error if now[0] == VERIFY else -error)
        for (kind, here, _), sign in ((before, -1.0), (now, 1.0)):
            shape, visits = self._shape[kind], self._visits[kind]
            near = [NEIGHBOUR ** abs(i - here) for i in range(len(visits))]
            seen = sum(n * v for n, v in zip(near, visits, strict=True))
            moved = sign * error * max(LEAST_STEP, 1.0 / (TRUST + seen))
            shape[:] = [s + moved * n for s, n in zip(shape, near, strict=True)]
            visits[:] = [v + n for v, n in zip(visits, near, strict=True)]
        for kind in {before[0], now[0]}:
            self._curves[kind] = self._fitted(kind)
        self._verify_curve = np.array(self._curves[VERIFY])

    def _level(self, error: float) -> None:
        """A plain and a verifying round: most of the error is common to all rows, so that few
        rounds are enough to correct it."""
        step = max(LEAST_LEVEL_STEP, 1.0 / (LEVEL_TRUST + self._num_crossed))
        self._shape[VERIFY][:] = [shape + step * error for shape in self._shape[VERIFY]]
        self._num_crossed += 1

    def _fitted(self, kind: int) -> list[float]:
        base = self._start.verify_ms if kind == VERIFY else self._start.plain_ms
        return isotonic([ms * exp(by) for ms, by in zip(base, self._shape[kind], strict=True)])

    def _ms_of(self, kind: int, rows: int, sequences: int, context: float) -> float:
        without_attention = interpolated_at(self._start.rows, self._curves[kind], rows)
        return self._with_attention(without_attention, rows, sequences, context)

    def _with_attention(self, ms: N, rows: N, sequences: int, context: float) -> N:
        """As long as the machine takes at present."""
        start = self._start
        by_context = start.row_context_ms * rows + start.sequence_context_ms * sequences
        return self.slowdown * (ms + by_context * context)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads: the measurement at the start, nothing learned since."""
        return asdict(self._start)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "CostTable":
        curves = {name: tuple(fields[name]) for name in ("rows", "plain_ms", "verify_ms")}
        slopes = {name: fields[name] for name in ("row_context_ms", "sequence_context_ms")}
        return cls(MeasuredCosts(**curves, **slopes))


def _clipped(error: float) -> float:
    return min(max(error, -MAX_ERROR), MAX_ERROR)


def interpolated(grid: Array, values: Array, at: Array) -> Array:
    """Piecewise linear; beyond the last point with the slope up to it."""
    inside = np.interp(at, grid, values)
    if len(grid) == 1:
        return inside * np.maximum(at / grid[0], 1.0)
    slope = (values[-1] - values[-2]) / (grid[-1] - grid[-2])
    return inside + np.maximum(at - grid[-1], 0.0) * slope


def interpolated_at(grid: Sequence[int], values: Sequence[float], at: float) -> float:
    """`interpolated` of one place."""
    last = len(grid) - 1
    if at > grid[-1]:
        slope = (values[-1] - values[-2]) / (grid[-1] - grid[-2]) if last else values[0] / grid[0]
        return values[-1] + (at - grid[-1]) * slope
    here = place(grid, at)
    low = min(int(here), last - 1) if last else 0
    return values[low] + (here - low) * (values[min(low + 1, last)] - values[low])


def place(grid: Sequence[int], at: float) -> float:
    """The index of that point of the grid, a fraction between two, of the nearest one outside."""
    above = bisect_right(grid, at)
    if above in (0, len(grid)):
        return float(max(above - 1, 0))
    return above - 1 + (at - grid[above - 1]) / (grid[above] - grid[above - 1])


def isotonic(values: Sequence[float]) -> list[float]:
    """The nearest curve (least squares) that never falls: neighbours that do are pooled."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            above, many = pools.pop()
            mean, size = (mean * size + above * many) / (size + many), size + many
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]
