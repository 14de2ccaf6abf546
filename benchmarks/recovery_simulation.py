"""What the simulation has tried, and what it found."""

import sys
import time
from collections.abc import Sequence

from benchmarks.lib.report import Cell, Target
from tests.simulation.coverage import Coverage, summary
from tests.simulation.planted import PLANTED, finds
from tests.simulation.run import run_schedule
from tests.simulation.schedule import generate

COLUMNS = ("schedules", "seconds", "failed", "result")
PLANTED_COLUMNS = ("planted bug", "schedules", "seconds", "result")
MAX_SCHEDULES = 2000
FOUND = "found"
ABOUT = """\
The service's own code under a simulated loop, disk, network and engine (`tests/simulation`): seeded
schedules of at least 30 operations of two users with crashes, from seed 0 on. *seconds*: of one
core."""
ABOUT_PLANTED = """\
The same with a bug planted into the service: how many schedules ran, from seed 0 on, until one
failed that passes without the bug, and how long that took; where there was too little time, *not
found* says so. *seconds*: of one core."""
Rows = tuple[list[Sequence[Cell]], list[Target]]


def simulate(seconds: float) -> Rows:
    """seconds of a core. Failing seeds are said as they come."""
    coverage, num_run, failed = Coverage(), 0, list[int]()
    began_s = time.process_time()
    while time.process_time() - began_s < seconds:
        outcome = run_schedule(generate(num_run))
        if outcome.failures:
            failed.append(num_run)
            sys.stderr.write(f"seed {num_run}: {outcome.failures[0]}\n")
        num_run += 1
        coverage.add(outcome.coverage)
    took_s = time.process_time() - began_s
    result = summary(coverage)
    if failed:
        result += f"; failing seeds: {', '.join(map(str, failed))}"
    rows: list[Sequence[Cell]] = [(num_run, round(took_s, 1), len(failed), result)]
    return rows, [Target.at_most("failed schedules", len(failed), 0)]


def find_planted(seconds: float) -> Rows:
    """seconds: of a core for each bug, at most."""
    rows = [find(bug, seconds) for bug in sorted(PLANTED)]
    num_found = sum(row[-1] == FOUND for row in rows)
    return rows, [Target.at_least("planted bugs found", num_found, len(PLANTED))]


def find(bug: str, seconds: float) -> Sequence[Cell]:
    """The row of a planted bug."""
    began_s = time.process_time()
    for seed in range(MAX_SCHEDULES):
        is_found = finds(bug, seed)
        took_s = time.process_time() - began_s
        if is_found:
            return bug, seed + 1, round(took_s, 1), FOUND
        if took_s > seconds:
            break
    return bug, seed + 1, round(took_s, 1), "not found"
