"""`tinkercloud bench`: its options; `bench` does the work, and needs torch."""

import argparse
import json
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


def _speculation(arguments: Arguments) -> int:
    from tinkercloud.commands import bench

    options = bench.BenchOptions(arguments["tokens"], arguments["at_once"], arguments["detailed"])
    rows = bench.rows(with_models(config_of(arguments)), options, say_progress)
    say(json.dumps(rows, indent=1) if arguments["json"] else bench.table(rows))
    return 0
