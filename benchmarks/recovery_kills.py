"""What kills of a server and its engine leave of training runs."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from math import inf
from pathlib import Path

from benchmarks.lib.report import Cell, Target
from tests.e2e.kills import Result, run_all

COLUMNS = ("run", "ended", "at", "kills", "underway", "longest start s")
SEED = 1
ABOUT = """\
SFT and RL on SmolLM2 through the official SDK and through `tinker_gmi`, on a server with its
defaults, while the server or its engine is ended at seeded moments (`tests/e2e/kills.py`): by
SIGKILL, and the server now and then by SIGTERM. *at*: what the run was doing. *underway*:
operations and samples that were acknowledged and had no outcome yet. *longest start*: of the
server, from its end. What the client saw (every log-probability, loss, gradient norm, sample) and
the files of its checkpoints are compared, bit for bit, with the same run without kills."""


def measure(
    weights: Path, num_kills: int, seconds: float = inf
) -> tuple[list[Sequence[Cell]], list[Target]]:
    """seconds: after which no other part of the schedule begins."""
    results: list[Result] = []
    began = time.monotonic()
    for result in run_all(SEED, num_kills, weights):
        sys.stderr.write(f"{result}\n")
        results.append(result)
        if time.monotonic() - began > seconds:
            break
    return rows(results), targets(results, num_kills)


def rows(results: Sequence[Result]) -> list[Sequence[Cell]]:
    kinds = {
        (f"{result.sdk}, {result.loop}", f"{kill.target}, {kill.signal}", kill.moment)
        for result in results
        for kill in result.killed
    }
    num, underway, longest_s = Counter[tuple[str, ...]](), Counter[tuple[str, ...]](), {}
    for result in results:
        for kill in result.killed:
            kind = f"{result.sdk}, {result.loop}", f"{kill.target}, {kill.signal}", kill.moment
            num[kind] += 1
            underway[kind] += kill.pending_operations + kill.pending_samples
            longest_s[kind] = max(longest_s.get(kind, 0.0), kill.down_s)
    return [
        (*kind, num[kind], underway[kind], round(longest_s[kind], 1) if longest_s[kind] else "-")
        for kind in sorted(kinds)
    ]


def targets(results: Sequence[Result], num_kills: int) -> list[Target]:
    num_differences = sum(len(result.differences) for result in results)
    return [
        Target.at_most("numbers and files with other bits", num_differences, 0),
        Target.at_most("kills that did not come", sum(r.missing for r in results), 0),
        Target.at_least("kills", sum(len(r.killed) for r in results), num_kills),
    ]
