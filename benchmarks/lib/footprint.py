"""What a process and all below it hold, as it changes while others use it."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.processes import families

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PERIOD_S = 0.5


@dataclass(frozen=True)
class Footprint:
    """memory_mb: resident, in 10**6 bytes."""

    memory_mb: float
    descriptors: int


def footprint(pid: int) -> Footprint:
    """On Linux."""
    children, left = families(), [pid]
    memory_bytes = descriptors = 0
    while left:
        process = left.pop()
        left += children.get(process, [])
        try:
            resident = int(Path(f"/proc/{process}/statm").read_text().split()[1])
            descriptors += len(os.listdir(f"/proc/{process}/fd"))
        except OSError:  # it has just ended
            continue
        memory_bytes += resident * PAGE_BYTES
    return Footprint(memory_bytes / 1e6, descriptors)


def processor_s(pid: int) -> float:
    """That a process and those below it have had of all cores, so far."""
    children, left, ticks = families(), [pid], 0
    while left:
        process = left.pop()
        left += children.get(process, [])
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        ticks += int(fields[11]) + int(fields[12])  # utime and stime of proc(5)
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class History:
    """Of one process, each with seconds since the first."""

    points: Sequence[tuple[float, Footprint]]

    def between(self, first: float, last: float) -> Footprint:
        """The medians of a part of the time, whose ends are shares of all of it."""
        end = self.points[-1][0]
        part = [each for at, each in self.points if first * end <= at <= last * end]
        part = part or [self.points[-1][1]]
        middle = len(part) // 2
        return Footprint(
            sorted(each.memory_mb for each in part)[middle],
            sorted(each.descriptors for each in part)[middle],
        )

    @property
    def most(self) -> Footprint:
        return Footprint(
            max(each.memory_mb for _, each in self.points),
            max(each.descriptors for _, each in self.points),
        )


@asynccontextmanager
async def watched(pid: int) -> AsyncGenerator[list[tuple[float, Footprint]]]:
    """The points of a `History`, which grow until the block ends."""
    points: list[tuple[float, Footprint]] = []

    async def watch() -> None:
        start = time.monotonic()
        while True:
            points.append((time.monotonic() - start, footprint(pid)))
            await asyncio.sleep(PERIOD_S)

    watcher = asyncio.create_task(watch())
    try:
        yield points
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        points.append((points[-1][0] if points else 0.0, footprint(pid)))


def files_of(folder: Path) -> tuple[int, float]:
    """Their number, and their size in 10**6 bytes."""
    sizes = []
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                sizes.append(path.stat().st_size)
        except OSError:  # it has just been removed
            continue
    return len(sizes), sum(sizes) / 1e6
