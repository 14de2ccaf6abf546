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
from statistics import median

from benchmarks.lib.recovery_server import MODE, MODULE
from benchmarks.lib.report import Cell, Target
from benchmarks.lib.server import embedded_flags
from benchmarks.lib.training_http import TrainedModel
from tests.serving import Server, running
from tinkercloud.services.recovery.snapshots import SHARE

TAKEN, UNDERWAY = "tinkercloud_snapshots", "tinkercloud_snapshots_underway"

COLUMNS = (
    *("trained", "step", "steps", "without ms", "with ms", "journal %", "journal bytes/step"),
    *("flush ms", "snapshots", "MB each", "s each", "extra s each", "due every s", "snapshots %"),
    "both %",
)
GOAL_PERCENT = 3.0
STEPS = {"4 x 128": (4, 128), "1 x 16": (1, 16)}
TRAINED = {"LoRA 32": 32, "full": 0}
ROUND_S = 5.0
ABOUT = """\
The same steps (a forward_backward of that many datums and tokens and an optim_step, both sent
before either is waited for) on two servers, in turns of a few seconds: one as it is, and one that
keeps no journal, takes no snapshots and does not flush its commits
(`benchmarks/lib/recovery_server.py`). *without*, *with*: medians of steps beside which no snapshot
was copied or written, so that *journal %* is the cost of journal and flushes; the other server
waits for its turn until no snapshot is underway. *snapshots*: those of the run. *s each*: copying
and writing one. *extra s each*: what all steps beside it took longer than the median. *due every*:
seconds of computing from such a snapshot to the next one, which the server derives from *s each*.
*snapshots %*: the extra seconds of those. *journal bytes*: of the requests that are kept. *flush*:
of a commit with such a request, what the flush to the disk takes, measured alone. *both %*: their
sum, where a *journal %* below 0, which is noise, counts as 0."""


@dataclass
class Loop:
    """One server's part. seconds: of steps with no snapshot beside them. beside_s: of the
    others."""

    model: TrainedModel
    seconds: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)

    async def run(self, batch: int, tokens: int, seconds: float) -> None:
        """So long, and until no snapshot is underway."""
        began = time.monotonic()
        before = await self.model.metrics()
        while time.monotonic() - began < seconds or before[UNDERWAY]:
            took_s = await self.model.step(batch, tokens)
            after = await self.model.metrics()
            # A snapshot begins before the operation that it follows is answered.
            is_alone = not (before[UNDERWAY] or after[UNDERWAY] or before[TAKEN] != after[TAKEN])
            (self.seconds if is_alone else self.beside_s).append(took_s)
            before = after


@dataclass(frozen=True)
class Compared:
    """without_s, with_s: of each step with no snapshot beside it. beside_s: of the others of the
    server that has recovery. snapshot_bytes, snapshot_s: of all snapshots."""

    trained: str
    step: str
    without_s: Sequence[float]
    with_s: Sequence[float]
    beside_s: Sequence[float]
    journal_bytes: float
    num_snapshots: int
    snapshot_bytes: float
    snapshot_s: float
    flush_s: float

    @property
    def journal_percent(self) -> float:
        return 100 * (median(self.with_s) / median(self.without_s) - 1)

    @property
    def extra_s(self) -> float:
        """Of all snapshots."""
        return sum(self.beside_s) - len(self.beside_s) * median(self.with_s)

    @property
    def snapshots_percent(self) -> float:
        """Each of them pays for the computing until the next one is due."""
        return 100 * self.extra_s / (self.snapshot_s / SHARE)

    @property
    def percent(self) -> float:
        """A journal cannot save time: a difference below 0 is noise."""
        return max(self.journal_percent, 0.0) + self.snapshots_percent

    def cells(self) -> tuple[Cell, ...]:
        times_ms = (round(1e3 * median(each), 2) for each in (self.without_s, self.with_s))
        each_s = self.snapshot_s / self.num_snapshots
        return (
            *(self.trained, self.step, len(self.with_s) + len(self.beside_s), *times_ms),
            *(round(self.journal_percent, 2), round(self.journal_bytes)),
            *(round(1e3 * self.flush_s, 2), self.num_snapshots),
            round(self.snapshot_bytes / self.num_snapshots / 1e6, 1),
            *(round(each_s, 2), round(self.extra_s / self.num_snapshots, 2)),
            *(round(each_s / SHARE, 1), round(self.snapshots_percent, 2), round(self.percent, 2)),
        )


async def measure(
    weights: Path, dtype: str, steps: Sequence[str], seconds: float
) -> tuple[list[Sequence[Cell]], list[Target]]:
    """steps: of STEPS. seconds: of each row, at least; each goes on until it has a snapshot."""
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
            loops = [await warm_loop(s, TRAINED[trained], (batch, tokens)) for s in (off, on)]
            before = await loops[1].model.metrics()
            began = time.monotonic()
            num_bytes = 0.0
            while time.monotonic() - began < seconds or not loops[1].beside_s:
                for loop in loops:
                    await loop.run(batch, tokens, min(ROUND_S, seconds / 2))
                # The most, for a snapshot may just have ended the journal.
                kept = await asyncio.to_thread(journal_bytes, data_dir)
                num_bytes = max(num_bytes, kept)
            after = await loops[1].model.metrics()
            for loop in loops:
                await loop.model.close()
        grown = {name: after[name] - before[name] for name in after if name in before}
        flush_s = await asyncio.to_thread(flush_cost_s, Path(folder), round(num_bytes))
    return Compared(
        *(trained, step, loops[0].seconds, loops[1].seconds, loops[1].beside_s, num_bytes),
        num_snapshots=round(grown[TAKEN]),
        snapshot_bytes=grown["tinkercloud_snapshot_bytes"],
        snapshot_s=grown["tinkercloud_snapshot_seconds"],
        flush_s=flush_s,
    )


async def warm_loop(server: Server, rank: int, step: tuple[int, int]) -> Loop:
    """Of a new model: another one has warmed the server up, so that the first steps count, beside
    which a snapshot may be written."""
    warm_up = Loop(await TrainedModel.create(server, rank))
    await warm_up.run(*step, 0.1)
    await warm_up.model.unload()
    await warm_up.model.close()
    return Loop(await TrainedModel.create(server, rank))


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
