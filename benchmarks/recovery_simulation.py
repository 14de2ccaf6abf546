"""What the simulation has tried, and what it found."""

import time
from collections.abc import Sequence

from benchmarks.lib.report import Cell, Target
from tests.simulation.coverage import Coverage, summary
from tests.simulation.planted import PLANTED, finds
from tests.simulation.run import run_schedule
from tests.simulation.schedule import generate

COLUMNS = ("what", "schedules", "seconds", "failed", "result")
MAX_SCHEDULES = 2000
ABOUT = """\
The service's own code under a simulated loop, disk, network and engine (`tests/simulation`): seeded
schedules of at least 30 operations of two users with crashes. The first row is the code as it is.
Each other row has a bug planted into it: how many schedules ran until one failed that passes
without the bug, and how long that took; where there was too little time, *not found* says so.
*seconds*: of one core."""


def simulate(seconds: float, planted_seconds: float) -> tuple[list[Sequence[Cell]], list[Target]]:
    """seconds of a core. planted_seconds: for each planted bug, at most."""
    coverage, num_run, failed = Coverage(), 0, list[int]()
    began_s = time.process_time()
    while time.process_time() - began_s < seconds:
        outcome = run_schedule(generate(num_run))
        if outcome.failures:
            failed.append(num_run)
        num_run += 1
        coverage.add(outcome.coverage)
    took_s = time.process_time() - began_s
    result = summary(coverage)
    if failed:
        result += f"; failing seeds: {', '.join(map(str, failed))}"
    rows: list[Sequence[Cell]] = [("as it is", num_run, round(took_s, 1), len(failed), result)]
    found = [find(bug, planted_seconds) for bug in sorted(PLANTED)]
    num_found = sum(row[3] == 1 for row in found)
    return [*rows, *found], [
        Target.at_most("failed schedules", len(failed), 0),
        Target.at_least("planted bugs found", num_found, len(PLANTED)),
    ]


def find(bug: str, seconds: float) -> Sequence[Cell]:
    """The row of a planted bug."""
    began_s = time.process_time()
    for seed in range(MAX_SCHEDULES):
        is_found = finds(bug, seed)
        took_s = time.process_time() - began_s
        if is_found:
            return f"planted: {bug}", seed + 1, round(took_s, 1), 1, "found"
        if took_s > seconds:
            break
    return f"planted: {bug}", seed + 1, round(took_s, 1), 0, "not found"
