"""How much memory the engine process has, and how much at most while it samples and trains."""

import resource
import time
from collections.abc import Callable
from pathlib import Path

SAMPLING, TRAINING = "sampling", "training"
INTERVAL_S = 0.2  # between two looks in the same phase


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


class PhaseMemory:
    """Looks after a step of sampling and after a slice of training: what a slice frees before its
    end is not seen, where the allocator gives it back at once."""

    def __init__(
        self,
        resident: Callable[[], int] = resident_bytes,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._resident, self._clock = resident, clock
        self._most: dict[str, int] = {}
        self._looked_s: dict[str, float] = {}

    def worked(self, phase: str) -> None:
        now_s = self._clock()
        if now_s - self._looked_s.get(phase, -INTERVAL_S) >= INTERVAL_S:
            self._looked_s[phase] = now_s
            self._most[phase] = max(self._most.get(phase, 0), self._resident())

    def stats(self) -> dict[str, int]:
        """A phase that has not been yet has no number."""
        most = {f"{phase}_memory_bytes": size for phase, size in self._most.items()}
        return {"engine_memory_bytes": self._resident(), **most}
