"""Recovery: how soon a server serves again, what its journal and snapshots cost, what proves it.

One part a run, each with a result of its own: `restart`, `steps`, `kills` and `runs` measure real
servers with real weights; `simulation` runs schedules, and `planted` those of a service with bugs.
"""

import asyncio
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from math import inf

from benchmarks import (
    recovery_kills,
    recovery_restart,
    recovery_runs,
    recovery_simulation,
    recovery_steps,
)
from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.machine import versions
from benchmarks.lib.processes import prepare_process
from benchmarks.lib.report import Cell, Report, Target
from benchmarks.lib.smollm2 import weights

PARTS = ("restart", "steps", "simulation", "planted", "kills", "runs")
BUSY_LOAD = 0.5
"""Of the machine's last minute before a measurement, in cores."""
Table = tuple[Sequence[str], list[Sequence[Cell]], list[Target]]


def parser() -> BenchmarkParser:
    made = BenchmarkParser("recovery", __doc__, quick="short journals, few steps and schedules")
    made.add_argument("--part", choices=PARTS, default="restart")
    made.add_argument("--dtypes", default="bfloat16,float32", help="of the base weights")
    made.add_argument(
        *("--seconds",), type=float, default=180.0, help="of a row of steps; of the simulation"
    )
    made.add_argument(
        *("--planted-seconds",), type=float, default=120.0, help="for a planted bug, at most"
    )
    made.add_argument("--kills", type=int, default=100, help="how many")
    made.add_argument(
        *("--kills-seconds",), type=float, default=inf, help="no other run begins after so many"
    )
    return made


def measured(options: Namespace) -> tuple[str, Table]:
    """The text about the part, and its table."""
    dtypes = options.dtypes.split(",")
    seconds = 4.0 if options.quick else options.seconds
    match options.part:
        case "restart":
            lengths = recovery_restart.QUICK_LENGTHS if options.quick else recovery_restart.LENGTHS
            rows = asyncio.run(recovery_restart.measure(weights(), dtypes, lengths))
            return recovery_restart.ABOUT, (recovery_restart.COLUMNS, *rows)
        case "steps":
            steps = list(recovery_steps.STEPS)[-1 if options.quick else 0 :]
            rows = asyncio.run(recovery_steps.measure(weights(), dtypes[0], steps, seconds))
            return recovery_steps.ABOUT, (recovery_steps.COLUMNS, *rows)
        case "simulation":
            rows = recovery_simulation.simulate(seconds)
            return recovery_simulation.ABOUT, (recovery_simulation.COLUMNS, *rows)
        case "planted":
            planted_s = 1.0 if options.quick else options.planted_seconds
            rows = recovery_simulation.find_planted(planted_s)
            about, columns = recovery_simulation.ABOUT_PLANTED, recovery_simulation.PLANTED_COLUMNS
            return about, (columns, *rows)
        case "kills":
            num_kills = 4 if options.quick else options.kills
            rows = recovery_kills.measure(weights(), num_kills, options.kills_seconds)
            return recovery_kills.ABOUT, (recovery_kills.COLUMNS, *rows)
        case _:
            num_steps = 4 if options.quick else recovery_runs.NUM_STEPS
            rows = recovery_runs.measure(weights(), num_steps)
            return recovery_runs.ABOUT, (recovery_runs.COLUMNS, *rows)


def main(argv: Sequence[str] | None = None) -> int:
    command = parser()
    options = command.parse_args(argv)
    prepare_process()
    load = os.getloadavg()[0]
    about, (columns, rows, targets) = measured(options)
    if load > BUSY_LOAD:
        about += f"\n\nThe machine was busy: {load:.1f} processes ran before this began."
    Report(
        title="Recovery",
        about=about,
        command=command.command(options),
        columns=columns,
        rows=rows,
        versions=versions("tinkercloud", "torch", "numpy"),
        targets=targets,
    ).publish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
