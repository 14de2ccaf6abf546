"""What the simulation and the kills have tried, and what they found."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.report import Cell, Target
from tests.simulation.coverage import Coverage, all_awaits
from tests.simulation.planted import PLANTED, planted
from tests.simulation.run import run_schedule
from tests.simulation.schedule import generate

SIMULATION_COLUMNS = ("what", "schedules", "seconds", "failed", "result")
MAX_SCHEDULES = 2000
ABOUT_SIMULATION = """\
The service's own code under a simulated loop, disk, network and engine (`tests/simulation`): seeded
schedules of at least 30 operations of two users with crashes. The first row is the code as it is.
Each other row has a bug planted into it: how many schedules ran until one failed, and how long that
took; where there was too little time, *not found* says so."""
ABOUT_KILLS = """\
A run of training and sampling on real weights while SIGKILL ends the server or its engine at seeded
moments; what the client saw is compared, bit for bit, with the run without kills."""
ABOUT_RUNS = """\
Runs computed again from their archive, and branched from a step of it."""


def simulate(seconds: float, planted_seconds: float) -> tuple[list[Sequence[Cell]], list[Target]]:
    """planted_seconds: for each planted bug, at most."""
    coverage, num_run, num_failed = Coverage(), 0, 0
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        outcome = run_schedule(generate(num_run))
        num_run += 1
        num_failed += bool(outcome.failures)
        coverage.add(outcome.coverage)
    took_s = time.monotonic() - began
    points = crash_points(coverage)
    rows: list[Sequence[Cell]] = [("as it is", num_run, round(took_s, 1), num_failed, points)]
    found = [find(bug, planted_seconds) for bug in sorted(PLANTED)]
    num_found = sum(row[3] == 1 for row in found)
    return [*rows, *found], [
        Target.at_most("failed schedules", num_failed, 0),
        Target.at_least("planted bugs found", num_found, len(PLANTED)),
    ]


def crash_points(coverage: Coverage) -> str:
    awaits = all_awaits()
    hit = sum(coverage.crashed[place] > 0 for place in awaits)
    others = len(set(coverage.crashed) - set(awaits))
    return f"crashed at {hit} of {len(awaits)} awaits, {others} writes, flushes and messages"


def find(bug: str, seconds: float) -> Sequence[Cell]:
    """The row of a planted bug."""
    began = time.monotonic()
    with planted(bug):
        for seed in range(MAX_SCHEDULES):
            failures = run_schedule(generate(seed)).failures
            took_s = time.monotonic() - began
            if failures:
                return f"planted: {bug}", seed + 1, round(took_s, 1), 1, "found"
            if took_s > seconds:
                break
    return f"planted: {bug}", seed + 1, round(took_s, 1), 0, "not found"


def from_file(path: Path) -> tuple[Sequence[str], list[Sequence[Cell]], list[Target]]:
    """A table that another program measured: {"columns": [...], "rows": [[...]], "targets": [...]},
    a target as in a report."""
    measured: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    targets = [Target(**each) for each in measured.get("targets", ())]
    return measured["columns"], measured["rows"], targets
