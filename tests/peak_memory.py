"""How much memory a process has, and the most that it had for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROCESS = Path("/proc/self")


def resident_bytes(field: str = "RssAnon", pid: int | None = None) -> int:
    """Of this process or another. RssAnon: without the pages of mapped files."""
    process = PROCESS if pid is None else Path(f"/proc/{pid}")
    for line in (process / "status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"there is no {field}")


class PeakMemory:
    """num_bytes: the most that any of the blocks under `measured` took above what was there before
    it. What stays between them does not count: Hypothesis keeps hundreds of megabytes of thousands
    of inputs. Where there is no Linux nothing is measured."""

    def __init__(self) -> None:
        self.num_bytes = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        if not PROCESS.exists():
            yield
            return
        (PROCESS / "clear_refs").write_text("5")  # the peak begins anew
        before = resident_bytes("VmRSS")
        try:
            yield
        finally:
            self.num_bytes = max(self.num_bytes, resident_bytes("VmHWM") - before)
