"""`tinkercloud backup`: the data folder as another folder, while a server runs or not."""

import argparse
from pathlib import Path

from tinkercloud.commands.options import Arguments, add_settings, config_of, say, say_progress
from tinkercloud.services.checkpoints.backups import back_up


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="to make; it must not be there yet")
    add_settings(parser, ["data_dir"])
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    folder = arguments["folder"]
    say(f"{folder}: {back_up(config_of(arguments).data_dir, folder, say_progress)}")
    return 0
