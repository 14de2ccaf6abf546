"""What stood of drafts, on disk: a line for each of the policy's steps, or each minute between."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tinkercloud.speculative.observability.acceptance_tracker import AcceptanceTracker

FILE = "acceptance.jsonl"
MOST_BYTES = 4 * 1024**2  # then the older half goes


@dataclass(frozen=True, slots=True)
class Line:
    """time: seconds since 1970. step: of the policy since the server started. category: the model
    that was sampled. draft: the version that drafted, "" for one that is not trained."""

    time: float
    step: int
    category: str
    proposed: int
    accepted: int
    draft: str = ""


class AcceptanceLog:
    """One writer; whoever reads sees whole lines but perhaps the last."""

    def __init__(self, folder: Path):
        self._path = folder / FILE

    def add(self, lines: list[Line]) -> None:
        if not lines:
            return
        if self._path.exists() and self._path.stat().st_size > MOST_BYTES:
            self._cut()
        with self._path.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(asdict(line)) + "\n" for line in lines)

    def lines(self) -> list[Line]:
        """Oldest first; what cannot be read is left out."""
        if not self._path.exists():
            return []
        found = []
        for text in self._path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(Line(**json.loads(text)))
            except (ValueError, TypeError):
                continue
        return found

    def tracker(self, window: int = 4096) -> AcceptanceTracker:
        """Each moment that was written is a step of it."""
        tracker = AcceptanceTracker(window)
        number, last = 0, None
        for line in self.lines():
            if last is not None and line.time != last:
                number += 1
            last = line.time
            tracker.add(number, line.proposed, line.accepted, line.category)
        return tracker

    def _cut(self) -> None:
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        unfinished = self._path.with_suffix(".new")
        unfinished.write_text("".join(lines[len(lines) // 2 :]), encoding="utf-8")
        unfinished.replace(self._path)


@dataclass(slots=True)
class Counting:
    """Drafted tokens since the last line, by category."""

    counts: dict[str, list[int]] = field(default_factory=dict)

    def add(self, category: str, proposed: int, accepted: int) -> None:
        own = self.counts.setdefault(category, [0, 0])
        own[0] += proposed
        own[1] += accepted

    @property
    def rate(self) -> float | None:
        proposed = sum(own[0] for own in self.counts.values())
        return sum(own[1] for own in self.counts.values()) / proposed if proposed else None

    def lines(self, step: int, draft: str) -> list[Line]:
        """What was counted, and begin anew."""
        now = time.time()
        told = [
            Line(now, step, category, proposed, accepted, draft)
            for category, (proposed, accepted) in self.counts.items()
            if proposed
        ]
        self.counts = {}
        return told
