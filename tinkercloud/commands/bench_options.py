"""`tinkercloud bench`: its options; `bench` does the work, and needs torch."""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

from tinkercloud.commands.options import (
    Arguments,
    add_settings,
    config_of,
    say,
    say_progress,
    with_models,
)


def add_options(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    speculation = kinds.add_parser("speculation", help="samples with drafts against those without")
    speculation.add_argument("--tokens", type=int, default=128, help="of each sample [128]")
    speculation.add_argument("--at-once", type=int, default=32, help="samples, at most [32]")
    speculation.add_argument(
        "--detailed", type=Path, help="write here where drafts were wrong (JSON lines)"
    )
    speculation.add_argument("--json", action="store_true", help="for programs")
    add_settings(speculation)
    speculation.set_defaults(run=_speculation)
    _add_pipeline(kinds.add_parser("pipeline", help="drafts of another machine, by its distance"))


def _add_pipeline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=96, help="of the sample [96]")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts [3]")
    parser.add_argument(
        "--round-trips-ms", type=_numbers, metavar="MS,MS", help="[0,2,5,10,20,50,100,200]"
    )
    parser.add_argument(
        "--loss-percent", type=_share, metavar="PERCENT",
        help="of packets, with the worker in a network namespace behind a link of each round trip "
        "(Linux, root); else relays delay what TCP carries",
    )  # fmt: skip
    parser.add_argument(
        "--trace", type=Path, help="write here what both sides did when (chrome://tracing)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    add_settings(parser)
    parser.set_defaults(run=_pipeline)


def _numbers(text: str) -> tuple[float, ...]:
    numbers = tuple(float(part) for part in text.split(","))
    if not all(0 <= number < math.inf for number in numbers):
        raise ValueError
    return numbers


def _speculation(arguments: Arguments) -> int:
    from tinkercloud.commands import bench

    options = bench.BenchOptions(arguments["tokens"], arguments["at_once"], arguments["detailed"])
    rows = bench.rows(with_models(config_of(arguments)), options, say_progress)
    say(json.dumps(rows, indent=1) if arguments["json"] else bench.table(rows))
    return 0


def _share(text: str) -> float:
    if not 0 <= float(text) < 100:
        raise ValueError
    return float(text) / 100


def _pipeline(arguments: Arguments) -> int:
    from tinkercloud.commands.bench import aligned
    from tinkercloud.commands.pipeline import measure

    scale = measure.Scale(arguments["tokens"], arguments["repeats"], loss=arguments["loss_percent"])
    if arguments["round_trips_ms"] is not None:
        scale = replace(scale, round_trips_ms=arguments["round_trips_ms"])
    points = measure.measured(with_models(config_of(arguments)), scale, say_progress)
    rows = [point.cells() for point in points]
    if arguments["trace"] is not None:
        measure.write_spans(points[0], arguments["trace"])
    if arguments["json"]:
        table = [dict(zip(measure.COLUMNS, row, strict=True)) for row in rows]
        say(json.dumps(table, indent=1))
    else:
        say("\n".join(aligned([measure.COLUMNS, *([str(cell) for cell in row] for row in rows)])))
    return 0
