"""What journal, flushes and snapshots cost of a step of training."""

import asyncio
import os
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

from benchmarks.lib.recovery_server import MODE, MODULE
from benchmarks.lib.report import Cell, Target
from benchmarks.lib.server import embedded_flags
from benchmarks.lib.training_http import TrainedModel
from tests.serving import Server, running

COLUMNS = (
    *("trained", "step", "steps", "without ms", "with ms", "difference %", "median %"),
    *("journal bytes/step", "snapshots", "snapshot MB", "flush ms"),
)
GOAL_PERCENT = 3.0
STEPS = {"8 x 256": (8, 256), "1 x 16": (1, 16)}
TRAINED = {"LoRA 32": 32, "full": 0}
ROUND = 5
ABOUT = """\
The same steps (a forward_backward of that many datums and tokens and an optim_step, both sent
before either is waited for) on two servers, in turns of a few steps: one as it is, and one that
keeps no journal, takes no snapshots and does not flush its commits
(`benchmarks/lib/recovery_server.py`). *difference*: of the mean, which has the steps during which a
snapshot is copied and written; the median has few of them. *journal*: bytes of the requests that it
keeps. *snapshots*: those taken in the run, and what they wrote. *flush*: of a commit with such a
request, what the flush to the disk takes, measured alone."""


@dataclass
class Loop:
    """One server's part. seconds: of each step."""

    model: TrainedModel
    seconds: list[float] = field(default_factory=list)

    async def run(self, batch: int, tokens: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self.seconds.append(await self.model.step(batch, tokens))


@dataclass(frozen=True)
class Compared:
    """without_s, with_s: of each step."""

    trained: str
    step: str
    without_s: Sequence[float]
    with_s: Sequence[float]
    journal_bytes: float
    num_snapshots: int
    snapshot_bytes: float
    flush_s: float

    @property
    def percent(self) -> float:
        return 100 * (mean(self.with_s) / mean(self.without_s) - 1)

    def cells(self) -> tuple[Cell, ...]:
        times_ms = (round(1e3 * mean(each), 2) for each in (self.without_s, self.with_s))
        typical = 100 * (median(self.with_s) / median(self.without_s) - 1)
        return (
            *(self.trained, self.step, len(self.with_s), *times_ms),
            *(round(self.percent, 2), round(typical, 2), round(self.journal_bytes)),
            *(self.num_snapshots, round(self.snapshot_bytes / 1e6, 1)),
            round(1e3 * self.flush_s, 2),
        )


async def measure(
    weights: Path, dtype: str, steps: Sequence[str], seconds: float
) -> tuple[list[Sequence[Cell]], list[Target]]:
    """steps: of STEPS. seconds: of each row, at least; a full model has a snapshot only every few
    minutes."""
    compared = [
        await compare(weights, dtype, trained, step, seconds)
        for trained in TRAINED
        for step in steps
    ]
    return [each.cells() for each in compared], targets(compared)


def targets(compared: Sequence[Compared]) -> list[Target]:
    return [
        Target.at_most(f"% of a step, {each.trained}, {each.step}", each.percent, GOAL_PERCENT)
        for each in compared
    ]


async def compare(weights: Path, dtype: str, trained: str, step: str, seconds: float) -> Compared:
    batch, tokens = STEPS[step]
    flags = embedded_flags(weights, dtype)
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "with"
        off = Server(flags, Path(folder) / "without", {MODE: "off"}, module=MODULE)
        with running(off), running(Server(flags, data_dir)) as on:
            loops = [Loop(await TrainedModel.create(s, TRAINED[trained])) for s in (off, on)]
            for loop in loops:
                await loop.run(batch, tokens, 2)
                loop.seconds.clear()
            before = await loops[1].model.metrics()
            began = time.monotonic()
            num_bytes = 0.0
            while time.monotonic() - began < seconds:
                for loop in loops:
                    await loop.run(batch, tokens, ROUND)
                # The most, for a snapshot may just have ended the journal.
                kept = await asyncio.to_thread(journal_bytes, data_dir)
                num_bytes = max(num_bytes, kept)
            after = await loops[1].model.metrics()
            for loop in loops:
                await loop.model.close()
        grown = {name: after[name] - before[name] for name in after if name in before}
        flush_s = await asyncio.to_thread(flush_cost_s, Path(folder), round(num_bytes))
    return Compared(
        *(trained, step, loops[0].seconds, loops[1].seconds, num_bytes),
        num_snapshots=round(grown["tinkercloud_snapshots"]),
        snapshot_bytes=grown["tinkercloud_snapshot_bytes"],
        flush_s=flush_s,
    )


def journal_bytes(data_dir: Path) -> float:
    """Of a step: the mean of each kind's operations that are still kept."""
    query = "SELECT avg(length(request)) FROM operations WHERE kind != 'CreateModel' GROUP BY kind"
    path = data_dir / "tinkercloud.db"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return sum(average for (average,) in database.execute(query))


def flush_cost_s(folder: Path, num_bytes: int, num_commits: int = 40) -> float:
    """Of a commit of so many bytes, with the flush less without."""
    times: dict[str, float] = {}
    for synchronous in ("NORMAL", "FULL"):
        with closing(sqlite3.connect(folder / f"{synchronous}.db", isolation_level=None)) as probe:
            probe.execute("PRAGMA journal_mode = WAL")
            probe.execute(f"PRAGMA synchronous = {synchronous}")
            probe.execute("CREATE TABLE requests (request BLOB)")
            commits = []
            for _ in range(num_commits):
                began = time.perf_counter()
                probe.execute("INSERT INTO requests VALUES (?)", (os.urandom(num_bytes),))
                commits.append(time.perf_counter() - began)
            times[synchronous] = median(commits)
    return times["FULL"] - times["NORMAL"]
