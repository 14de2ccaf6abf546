"""What the simulation has tried, and what it found."""

import sys
import time
from collections.abc import Sequence

from benchmarks.lib.report import Cell, Target
from tests.simulation.coverage import summary
from tests.simulation.guide import Guide
from tests.simulation.planted import PLANTED, finds, seeds_for

COLUMNS = ("schedules", "seconds", "failed", "result")
PLANTED_COLUMNS = ("planted bug", "schedules", "tried", "seconds", "result")
MAX_SCHEDULES = 2000
FOUND = "found"
ABOUT = """\
The service's own code under a simulated loop, disk, network and engine (`tests/simulation`): seeded
schedules of at least 30 operations of two users with crashes, from seed 0 on; each fourth ends the
service at awaits and flushes where none before it has. *seconds*: of one core."""
ABOUT_PLANTED = """\
The same with a bug planted into the service: up to which of the schedules, from seed 0 on, one
failed that passes without the bug. *tried*: how many of them ran, for of a bug that few can show
(of a deletion, say) only those are tried that have what it needs (`CAN_SHOW` in
`tests/simulation/planted.py`). Where there was too little time, *not found* says so. *seconds*: of
one core."""
Rows = tuple[list[Sequence[Cell]], list[Target]]


def simulate(seconds: float) -> Rows:
    """seconds of a core. Failing seeds are said as they come."""
    guide, num_run, failed = Guide(), 0, list[str]()
    began_s = time.process_time()
    while time.process_time() - began_s < seconds:
        outcome = guide.run(num_run)
        if outcome.failures:
            failed.append(outcome.again)
            sys.stderr.write(f"{outcome.again}: {outcome.failures[0]}\n")
        num_run += 1
    took_s = time.process_time() - began_s
    result = summary(guide.coverage)
    if failed:
        result += f"; failing: {', '.join(failed)}"
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
    num_tried = num_schedules = 0
    result, took_s = "not found", 0.0
    for seed in seeds_for(bug, MAX_SCHEDULES):
        is_found = finds(bug, seed)
        num_tried, num_schedules = num_tried + 1, seed + 1
        took_s = time.process_time() - began_s
        if is_found:
            result = FOUND
        if is_found or took_s > seconds:
            break
    return bug, num_schedules, num_tried, round(took_s, 1), result
