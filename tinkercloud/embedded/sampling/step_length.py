"""How much a step may compute while somebody else's training waits for its end, or may come to.

What a step takes is a fixed part, which reads the weights, and a part for each row. Both are
learned from the steps: a line through their times, where those that are longer ago count less.
"""

from itertools import count
from math import inf

from tinkercloud.embedded.fairness.recent_users import SLICE_S
from tinkercloud.embedded.sampling.sequences import Sequence
from tinkercloud.embedded.sampling.victims import without_paused

FIXED_PARTS = 3.0
"""A step is not made shorter than so many times its fixed part, so that two thirds of its time are
its rows': to read the weights more often for the same rows would cost more than whoever waits
gains."""
MEMORY = 0.95  # of a time, from one step to the next
DOUBT = 0.02
"""How far the rows of steps have to differ, as a variance by the square of their mean, to tell what
a row takes: where they hardly do, it is what it was; at first, all of a step's time."""
LEAST_SLOPE = 0.25
"""Of what a row takes with its part of the fixed one. So no guess allows more than about four times
the rows that steps of such a time had."""


class StepTimes:
    """Of the steps until now, by their work: rows, as `RowWork` counts them."""

    def __init__(self) -> None:
        self._n = self._work = self._ms = self._work_work = self._work_ms = 0.0
        self._fixed_ms, self._slope = 0.0, inf

    def took(self, work: float, ms: float) -> None:
        added = (1.0, work, ms, work * work, work * ms)
        sums = (self._n, self._work, self._ms, self._work_work, self._work_ms)
        self._n, self._work, self._ms, self._work_work, self._work_ms = (
            MEMORY * each + more for each, more in zip(sums, added, strict=True)
        )
        mean_work, mean_ms = self._work / self._n, self._ms / self._n
        ratio = mean_ms / mean_work
        covariance = self._work_ms / self._n - mean_work * mean_ms
        variance = self._work_work / self._n - mean_work * mean_work
        doubt = DOUBT * mean_work * mean_work
        slope = (covariance + doubt * min(self._slope, ratio)) / (variance + doubt)
        self._slope = min(max(slope, LEAST_SLOPE * ratio), ratio)
        self._fixed_ms = mean_ms - self._slope * mean_work

    def work_within(self, ms: float) -> float:
        """Of a step that takes so long, or where that is longer FIXED_PARTS times its fixed part.
        0: nothing is known."""
        if not self._slope:
            return inf
        return (max(ms, FIXED_PARTS * self._fixed_ms) - self._fixed_ms) / self._slope


class StepLength:
    """most_work: of this step; infinite where it may be long. A short step leaves samples out, and
    each of a user's has its turn."""

    def __init__(self) -> None:
        self.most_work = inf
        self._times = StepTimes()
        self._turns: dict[Sequence, int] = {}  # the last of each, numbered in their order
        self._turn = count(1)
        self._work = 0.0  # of this step

    def begin(self, *, is_short: bool) -> None:
        self._work = 0.0
        self.most_work = self._times.work_within(1e3 * SLICE_S) if is_short else inf
        if not is_short:
            self._turns = {}

    def samples(self, batch: list[Sequence], *, prompts_wait: bool) -> list[Sequence]:
        """Those of the batch that run in this step, at least one; half of a short step is for
        prompts where some wait."""
        if self.most_work == inf:
            return batch
        most_work = self.most_work / 2 if prompts_wait else self.most_work
        work = sum(each.job.row_work.of(each.num_computed, 1) for each in batch)
        if work <= most_work:
            return batch
        most = max(int(len(batch) * most_work / work), 1)
        turns = {each: self._turns.get(each, 0) for each in batch}
        chosen = without_paused(sorted(batch, key=turns.__getitem__), most)
        self._turns = turns | dict(zip(chosen, self._turn, strict=False))
        return chosen

    def add(self, work: float) -> None:
        """It is in the step."""
        self._work += work

    @property
    def work_left(self) -> float:
        return max(self.most_work - self._work, 0.0)

    def took(self, ms: float) -> None:
        """The step is over."""
        if self._work:
            self._times.took(self._work, ms)
