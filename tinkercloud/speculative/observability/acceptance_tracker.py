"""How many of the drafted tokens stand, over the policy's steps and by category."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ALL = ""  # the category that holds everything


@dataclass(slots=True)
class Counts:
    proposed: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float | None:
        """None where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None


@dataclass(slots=True)
class _Step:
    number: int
    counts: dict[str, Counts] = field(default_factory=dict)


class AcceptanceTracker:
    """Counts of the last `window` policy steps; older ones are forgotten."""

    def __init__(self, window: int = 256):
        self._steps: deque[_Step] = deque(maxlen=window)

    def add(self, step: int, proposed: int, accepted: int, category: str = ALL) -> None:
        """What came of drafts during the policy's step `step`; steps never go back."""
        if not 0 <= accepted <= proposed:
            raise ValueError(f"{accepted} of {proposed} drafted tokens cannot stand")
        if not self._steps or self._steps[-1].number != step:
            self._steps.append(_Step(step))
        for name in {ALL, category}:
            counts = self._steps[-1].counts.setdefault(name, Counts())
            counts.proposed += proposed
            counts.accepted += accepted

    def rate(self, num_steps: int | None = None, category: str = ALL) -> float | None:
        """Accepted of proposed in the last `num_steps` steps together."""
        total = Counts()
        for counts in self._counts(category)[-(num_steps or len(self._steps)) :]:
            total.proposed += counts.proposed
            total.accepted += counts.accepted
        return total.rate

    def trend(self, num_steps: int | None = None, category: str = ALL) -> float:
        """Change of the rate per step, by least squares; 0 below two steps."""
        points = self._points(category)[-(num_steps or len(self._steps)) :]
        if len(points) < 2:
            return 0.0
        steps, rates = np.array(points).T
        steps = steps - steps.mean()
        return float((steps * (rates - rates.mean())).sum() / (steps**2).sum())

    def percentiles(
        self, wanted: Sequence[float] = (10, 50, 90), category: str = ALL
    ) -> dict[float, float]:
        """Of the steps' rates; empty where there are none."""
        rates = [rate for _, rate in self._points(category)]
        return {q: float(np.percentile(rates, q)) for q in wanted} if rates else {}

    def categories(self) -> list[str]:
        return sorted({name for step in self._steps for name in step.counts if name != ALL})

    def as_json(
        self, windows: Sequence[int] = (1, 10, 100), *, by_step: bool = True
    ) -> dict[str, Any]:
        """`by_step`: [step, rate] pairs, for a plot."""
        summary = self._summary(ALL, windows)
        summary["categories"] = {c: self._summary(c, windows) for c in self.categories()}
        if not by_step:
            for one in (summary, *summary["categories"].values()):
                del one["by_step"]
        return summary

    def _summary(self, category: str, windows: Sequence[int]) -> dict[str, Any]:
        return {
            "rate": self.rate(category=category),
            "windows": {str(n): self.rate(n, category) for n in windows},
            "trend_per_step": self.trend(category=category),
            "percentiles": {f"{q:g}": v for q, v in self.percentiles(category=category).items()},
            "by_step": [[step, rate] for step, rate in self._points(category)],
        }

    def _counts(self, category: str) -> list[Counts]:
        return [step.counts.get(category, Counts()) for step in self._steps]

    def _points(self, category: str) -> list[tuple[int, float]]:
        counts: Mapping[int, Counts] = {
            step.number: step.counts.get(category, Counts()) for step in self._steps
        }
        return [(number, c.rate) for number, c in counts.items() if c.rate is not None]
