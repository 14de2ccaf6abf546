"""How much and how tests try inputs that nobody chose."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings


def fuzzing(
    num_examples: int, *, repeats: bool, phases: Sequence[Phase] = (Phase.generate, Phase.shrink)
) -> settings:
    """repeats: the same inputs in each run, for tests that must not fail by chance."""
    return settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=repeats,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )


class LargestInput:
    """The most memory that the work on any one input took above what was there before it. What
    Hypothesis keeps of thousands of inputs is hundreds of megabytes, and does not count. Where
    there is no Linux nothing is measured."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._process = Path("/proc/self")

    @contextmanager
    def one(self) -> Iterator[None]:
        if not self._process.exists():
            yield
            return
        (self._process / "clear_refs").write_text("5")  # the peak begins anew
        before = self._status("VmRSS")
        try:
            yield
        finally:
            self.num_bytes = max(self.num_bytes, self._status("VmHWM") - before)

    def _status(self, field: str) -> int:
        text = (self._process / "status").read_text()
        return 1024 * int(text.partition(f"{field}:")[2].split(maxsplit=1)[0])
