"""How many of the drafted tokens are accepted, by the policy's steps and by category: in memory for
a summary, and on disk as a line for each step, or for each minute between two of them.

A category is the model that was sampled.
"""

import json
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ALL = ""  # the category that holds everything
FILE = "acceptance.jsonl"
MAX_BYTES = 4 * 1024**2  # then the older half is dropped


@dataclass(slots=True)
class Counts:
    proposed: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float | None:
        """None where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @classmethod
    def sum(cls, counts: Iterable["Counts"]) -> "Counts":
        total = cls()
        for part in counts:
            total.add(part.proposed, part.accepted)
        return total

    def add(self, proposed: int, accepted: int) -> None:
        self.proposed += proposed
        self.accepted += accepted


@dataclass(slots=True)
class _Step:
    number: int
    counts: defaultdict[str, Counts] = field(default_factory=lambda: defaultdict(Counts))


class AcceptanceTracker:
    """Counts of the last `window` policy steps; older ones are forgotten."""

    def __init__(self, window: int = 256):
        self._steps: deque[_Step] = deque(maxlen=window)

    def add(self, step: int, proposed: int, accepted: int, category: str = ALL) -> None:
        """Of tokens drafted during the policy's step `step`; steps never go back."""
        if not 0 <= accepted <= proposed:
            raise ValueError(f"{accepted} of {proposed} drafted tokens cannot be accepted")
        if not self._steps or self._steps[-1].number != step:
            self._steps.append(_Step(step))
        for name in {ALL, category}:
            self._steps[-1].counts[name].add(proposed, accepted)

    def rate(self, num_steps: int | None = None, category: str = ALL) -> float | None:
        """Accepted of proposed in the last `num_steps` steps together."""
        steps = list(self._steps)[-(num_steps or len(self._steps)) :]
        return Counts.sum(step.counts[category] for step in steps if category in step.counts).rate

    def trend(self, num_steps: int | None = None, category: str = ALL) -> float:
        """Change of the rate per step, by least squares; 0 below two steps."""
        points = self._points(category)[-(num_steps or len(self._steps)) :]
        if len(points) < 2:
            return 0.0
        steps, rates = np.array(points).T
        steps = steps - steps.mean()
        return float((steps * (rates - rates.mean())).sum() / (steps**2).sum())

    def percentiles(
        self, percents: Sequence[float] = (10, 50, 90), category: str = ALL
    ) -> dict[float, float]:
        """Of the steps' rates; empty where there are none."""
        rates = [rate for _, rate in self._points(category)]
        return {q: float(np.percentile(rates, q)) for q in percents} if rates else {}

    def as_json(self, windows: Sequence[int] = (1, 10, 100)) -> dict[str, Any]:
        names = sorted({name for step in self._steps for name in step.counts if name != ALL})
        categories = {name: self._summary(name, windows) for name in names}
        return {**self._summary(ALL, windows), "categories": categories}

    def _summary(self, category: str, windows: Sequence[int]) -> dict[str, Any]:
        return {
            "rate": self.rate(category=category),
            "windows": {str(n): self.rate(n, category) for n in windows},
            "trend_per_step": self.trend(category=category),
            "percentiles": {f"{q:g}": v for q, v in self.percentiles(category=category).items()},
        }

    def _points(self, category: str) -> list[tuple[int, float]]:
        steps = [step for step in self._steps if category in step.counts]
        rates = [(step.number, step.counts[category].rate) for step in steps]
        return [(number, rate) for number, rate in rates if rate is not None]


@dataclass(frozen=True, slots=True)
class Line:
    """time: seconds since 1970. step: of the policy since the server started. draft: the version
    that drafted, "" for one that is not trained."""

    time: float
    step: int
    category: str
    proposed: int
    accepted: int
    draft: str = ""


class AcceptanceLog:
    """Of one server: what was accepted goes to `tracker` at once and to the file by `write`. One
    writer; readers see whole lines but perhaps the last."""

    def __init__(self, folder: Path):
        self._path = folder / FILE
        self._unwritten: defaultdict[str, Counts] = defaultdict(Counts)
        self.tracker = AcceptanceTracker()

    def add(self, step: int, proposed: int, accepted: int, category: str) -> None:
        self.tracker.add(step, proposed, accepted, category)
        self._unwritten[category].add(proposed, accepted)

    @property
    def unwritten_rate(self) -> float | None:
        """Accepted of proposed since the last `write`."""
        return Counts.sum(self._unwritten.values()).rate

    def write(self, step: int, draft: str) -> None:
        """A line for each category since the last `write`, all of the same time. Raises OSError."""
        now, unwritten = time.time(), self._unwritten
        self._unwritten = defaultdict(Counts)
        self.append(
            Line(now, step, category, counts.proposed, counts.accepted, draft)
            for category, counts in unwritten.items()
            if counts.proposed
        )

    def append(self, lines: Iterable[Line]) -> None:
        texts = [json.dumps(asdict(line)) + "\n" for line in lines]
        if not texts:
            return
        if self._path.exists() and self._path.stat().st_size > MAX_BYTES:
            self._cut()
        with self._path.open("a", encoding="utf-8") as out:
            out.writelines(texts)

    def _cut(self) -> None:
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        unfinished = self._path.with_suffix(".new")
        unfinished.write_text("".join(lines[len(lines) // 2 :]), encoding="utf-8")
        unfinished.replace(self._path)


def read_moments(folder: Path) -> list[list[Line]]:
    """The lines of a folder's log, those of one time together, oldest first; lines that cannot be
    read are left out."""
    path, moments = folder / FILE, list[list[Line]]()
    if not path.exists():
        return moments
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = Line(**json.loads(text))
        except (ValueError, TypeError):
            continue
        if not moments or moments[-1][0].time != line.time:
            moments.append([])
        moments[-1].append(line)
    return moments


def tracker_of(moments: Sequence[Sequence[Line]], window: int = 4096) -> AcceptanceTracker:
    """Each moment is a step of it: the policy's steps begin anew with each server."""
    tracker = AcceptanceTracker(window)
    for number, lines in enumerate(moments):
        for line in lines:
            tracker.add(number, line.proposed, line.accepted, line.category)
    return tracker
