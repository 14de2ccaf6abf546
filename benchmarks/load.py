"""Many clients at once, attacks, a day of scripts, and how long the service itself takes.

One part a run, each with a result of its own; all but `latency` on the fake backend or on real
weights (--backend).
"""

import asyncio
import sys
from argparse import Namespace
from collections.abc import Sequence

from benchmarks import load_attacks, load_clients, load_day, load_latency
from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.machine import versions
from benchmarks.lib.processes import prepare_process
from benchmarks.lib.report import Cell, Report, Target, about
from benchmarks.lib.server import MODEL, Served, default_dtype, embedded_flags, our_server
from benchmarks.lib.smollm2 import weights
from tests.serving import Server
from tinkercloud.backends.fake import TINY

PARTS = ("clients", "latency", "attacks", "day")
FAKE, REAL = "fake", "real"
CLIENTS_S = {FAKE: 600.0, REAL: 180.0}
DAY_S = 600.0
PACE_S = {FAKE: 3.0, REAL: 15.0}
QUICK_S = 4.0
Measured = tuple[str, Sequence[str], list[Sequence[Cell]], list[Target]]
"""The text about a part, columns, rows, targets."""


def parser() -> BenchmarkParser:
    made = BenchmarkParser("load", __doc__, quick="few clients and scripts, some seconds of each")
    made.add_argument("--part", choices=PARTS, default="clients")
    made.add_argument("--backend", choices=(FAKE, REAL), default=FAKE)
    made.add_argument("--seconds", type=float, help="of clients [600, real: 180], of a day [600]")
    made.add_argument("--sampling", type=int, default=300, help="clients that sample")
    made.add_argument("--training", type=int, default=32, help="clients that train")
    made.add_argument("--processes", type=int, default=4, help="of clients")
    made.add_argument("--pace-s", type=float, help="mean pause of a client [3, real: 15]")
    made.add_argument("--phase-s", type=float, default=8.0, help="before, during and after attacks")
    made.add_argument("--attacks", default=",".join(load_attacks.ALL), help="their names")
    made.add_argument("--at-once", type=int, default=2, help="scripts of a day")
    made.add_argument("--kept-s", type=float, default=30.0, help="what scripts leave is kept")
    made.add_argument("--settle-s", type=float, default=180.0, help="after the last script")
    return made


def served(options: Namespace) -> Served:
    if options.backend == FAKE:
        return Served(TINY.name, ("--backend", "fake"), TINY.max_context_length, TINY.vocab_size)
    return Served(MODEL, embedded_flags(weights(), "auto"), context=8192, vocabulary=49_152)


def measured(options: Namespace) -> Measured:
    offer = served(options)
    if options.part == "latency":
        return latency(offer, options)
    plan = day_of(options)
    more = plan.flags if options.part == "day" else []
    with our_server(*offer.flags, *more) as server:
        match options.part:
            case "clients":
                return clients(server, offer, options)
            case "attacks":
                return attacks(server, offer, options)
            case _:
                result = asyncio.run(load_day.measure(server, offer, plan))
                return result.about(), load_day.COLUMNS, result.rows(), result.targets()


def latency(offer: Served, options: Namespace) -> Measured:
    rows = load_latency.run(offer, load_latency.QUICK if options.quick else load_latency.FULL)
    cells = [row.cells() for row in rows]
    return load_latency.about(rows), load_latency.COLUMNS, cells, load_latency.targets(rows)


def clients(server: Server, offer: Served, options: Namespace) -> Measured:
    seconds = options.seconds or CLIENTS_S[options.backend]
    pace_s = options.pace_s or PACE_S[options.backend]
    load = load_clients.Load(options.sampling, options.training, options.processes, seconds, pace_s)
    if options.quick:
        load = load_clients.Load(6, 2, 1, options.seconds or QUICK_S, 0.2)
    result = asyncio.run(load_clients.measure(server, offer, load))
    return result.about(), load_clients.COLUMNS, result.rows(), result.targets()


def attacks(server: Server, offer: Served, options: Namespace) -> Measured:
    names = options.attacks.split(",")
    phase_s, scale = (1.0, 0.01) if options.quick else (options.phase_s, 1.0)
    attacked = load_attacks.measure(server, offer, names, phase_s, scale)
    results, period_s = asyncio.run(attacked)
    rows = [each.cells() for each in results]
    text = load_attacks.ABOUT.format(phase=phase_s, period=period_s, calm=load_attacks.CALM_S)
    return text, load_attacks.COLUMNS, rows, load_attacks.targets(results)


def day_of(options: Namespace) -> load_day.Day:
    if options.quick:
        return load_day.Day(options.seconds or QUICK_S, 1, 5.0, settle_s=5.0, first=1)
    seconds = options.seconds or DAY_S
    return load_day.Day(seconds, options.at_once, options.kept_s, options.settle_s)


def main(argv: Sequence[str] | None = None) -> int:
    command = parser()
    options = command.parse_args(argv)
    prepare_process()
    text, columns, rows, targets = measured(options)
    where = "the fake backend" if options.backend == FAKE else f"SmolLM2-135M in {default_dtype()}"
    Report(
        title="Load",
        about=about(ABOUT, f"{text} On {where}."),
        command=command.command(options),
        columns=columns,
        rows=rows,
        versions=versions("tinkercloud", "tinker", "fastapi", "uvicorn", "aiosqlite", "numpy"),
        targets=targets,
    ).publish(options.json, by_instruction_set=options.backend == REAL)
    return 0


ABOUT = """\
A server in a process of its own under more than its users should ask of it, with its default
settings where nothing else is said. Clients, attackers and server share the machine's cores."""

if __name__ == "__main__":
    sys.exit(main())
