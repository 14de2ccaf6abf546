"""`tinkercloud restore`: a backup as the data folder of a server."""

import argparse
from pathlib import Path

from tinkercloud.commands.options import Arguments, add_settings, config_of, say, say_progress
from tinkercloud.services.checkpoints.backups import restore


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="that `tinkercloud backup` made")
    add_settings(parser, ["data_dir"])
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    data_dir = config_of(arguments).data_dir
    say(f"{data_dir}: {restore(arguments['folder'], data_dir, say_progress)}")
    return 0
