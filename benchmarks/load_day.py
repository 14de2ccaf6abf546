"""A day of ordinary scripts in minutes: what they leave behind."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import count

from benchmarks.lib.footprint import files_of, footprint
from benchmarks.lib.machine import ROOT
from benchmarks.lib.report import Cell, Target
from benchmarks.lib.script import DONE, ENDS
from benchmarks.lib.server import Served
from tests.serving import Server
from tinkercloud.config import settings

PERIOD_S = 1.0
SCRIPT_LIMIT_S = 120.0
MOST_MEMORY = 1.1
MAX_REASON_CHARS = 300
COLUMNS = ("what", "before", "after the first scripts", "most", "when all is over")


@dataclass(frozen=True)
class Day:
    """kept_s: how long the server keeps results, checkpoints and sessions without heartbeats; twice
    as long what such sessions have on the disk. settle_s: how long it may take to come back, at
    most. first: scripts before those that count, after which code and caches are in memory."""

    seconds: float
    at_once: int
    kept_s: float
    settle_s: float
    first: int = 6

    @property
    def flags(self) -> list[str]:
        names = ("result_ttl_s", "session_ttl_s", "idle_model_s")
        days = dict.fromkeys(("session_days", "archive_days"), 2 * self.kept_s / 86400)
        values = dict.fromkeys(names, self.kept_s) | days
        known = settings()
        return [word for name, value in values.items() for word in (known[name].flag, str(value))]


@dataclass(frozen=True)
class State:
    models: int
    versions: int
    memory_mb: float
    descriptors: int
    files: int
    disk_mb: float


NAMES = {
    "models": "models in memory",
    "versions": "published versions in memory",
    "memory_mb": "resident memory, MB",
    "descriptors": "open descriptors",
    "files": "files in the data folder",
    "disk_mb": "data folder, MB",
}


@dataclass
class Lived:
    day: Day
    before: State
    first: State
    most: State
    after: State
    ended: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def rows(self) -> list[Sequence[Cell]]:
        states = (self.before, self.first, self.most, self.after)
        return [
            (text, *(round(asdict(state)[name], 1) for state in states))
            for name, text in NAMES.items()
        ]

    def targets(self) -> list[Target]:
        at_most = Target.at_most
        grown = self.after.memory_mb / self.first.memory_mb
        return [
            at_most("scripts that failed", len(self.failures), 0),
            at_most("models in memory when all is over", self.after.models, self.before.models),
            at_most("published versions", self.after.versions, self.before.versions + 1),
            at_most("files", self.after.files, self.before.files),
            at_most("descriptors", self.after.descriptors, self.before.descriptors + 1),
            at_most("memory, by that after the first scripts", grown, MOST_MEMORY, 3),
        ]

    def about(self) -> str:
        ends = ", ".join(f"{number} {end}" for end, number in self.ended.items())
        return ABOUT.format(
            number=sum(self.ended.values()), ends=ends, seconds=self.day.seconds,
            at_once=self.day.at_once, kept=self.day.kept_s,
            days=2 * self.day.kept_s, first=self.day.first,
        ) + "".join(f"\n\nA script failed: {reason}" for reason in self.failures)  # fmt: skip


async def measure(server: Server, served: Served, day: Day) -> Lived:
    base_model = served.base_model
    before = _state(server)
    outcomes = [await _script(server, base_model, day, ENDS[i % 3]) for i in range(day.first)]
    first = await _come_back(server, before, day)
    states = [first]
    ended = dict.fromkeys(ENDS, 0)
    numbers, deadline = count(), time.monotonic() + day.seconds

    async def run_scripts() -> None:
        while time.monotonic() < deadline:
            end = ENDS[next(numbers) % len(ENDS)]
            outcomes.append(await _script(server, base_model, day, end))
            ended[end] += 1

    async def look() -> None:
        while True:
            states.append(await asyncio.to_thread(_state, server))
            await asyncio.sleep(PERIOD_S)

    looking = asyncio.create_task(look())
    await asyncio.gather(*(run_scripts() for _ in range(day.at_once)))
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    after = await _come_back(server, before, day)
    most = State(**{name: max(asdict(s)[name] for s in states) for name in NAMES})
    failures = [reason for reason in outcomes if reason is not None]
    return Lived(day, before, first, most, after, ended, failures)


def _state(server: Server) -> State:
    assert server.process is not None
    held = footprint(server.process.pid)
    with server.http() as http:
        stats = http.get("/health").json()["backend"]
    files, disk_mb = files_of(server.data_dir)
    return State(
        *(stats["num_models"], stats["num_versions"], held.memory_mb, held.descriptors),
        *(files, disk_mb),
    )


async def _come_back(server: Server, before: State, day: Day) -> State:
    """Once models and files are no more than before, or the time for that is up."""
    deadline = time.monotonic() + day.settle_s
    while True:
        state = await asyncio.to_thread(_state, server)
        is_back = state.models <= before.models and state.files <= before.files
        if is_back or time.monotonic() > deadline:
            return state
        await asyncio.sleep(PERIOD_S)


async def _script(server: Server, base_model: str, day: Day, end: str) -> str | None:
    """Why it failed; None: it did not."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.lib.script", base_model, str(day.kept_s), end),
        env={**os.environ, **server.sdk_environment, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(SCRIPT_LIMIT_S):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"one that {end} took longer than {SCRIPT_LIMIT_S:g} s"
    return failure(end, process.returncode, output, errors)


def failure(end: str, status: int | None, output: bytes, errors: bytes) -> str | None:
    """Of a script of that end, by its exit status and what it wrote."""
    if status == (-signal.SIGKILL if end == "is killed" else 0):
        return None
    when = "after all was done" if output == DONE.encode() else "before it was done"
    last = errors.decode(errors="replace").strip().rpartition("\n")[2]
    last = last[:MAX_REASON_CHARS] or "it said nothing"
    return f"one that {end} ended with status {status} {when}: {last}"


ABOUT = """\
*day*: {number} training scripts on the official SDK in {seconds:.0f} s, {at_once} at a time, each
in a process of its own: a LoRA model, three steps, a saved state, a sampling client, four samples.
How they ended: {ends}. The server keeps results, checkpoints and sessions without heartbeats for
{kept:g} s here, in place of hours, and what those sessions have on the disk, and runs for replays,
for {days:g} s, in place of `session_days` and `archive_days`. Memory is compared with that after
{first} scripts that came before: until then code and caches are loaded."""
