"""`tinkercloud keys`: make, list and revoke API keys."""

import argparse
from contextlib import closing
from datetime import UTC, datetime

from tinkercloud.commands.options import Arguments, add_settings, complain, config_of, say


def add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser("add", help="make a key and print it, this once")
    add.add_argument("user", nargs="?", default="default", help="whose work it gives access to")
    add.add_argument("--name", default="", help="tinker-cli-NAME may revoke itself")
    add.add_argument("--note", default="", help="what it is for")
    listing = commands.add_parser("list", help="ids, dates, users and names")
    revoke = commands.add_parser("revoke", help="make a key invalid")
    revoke.add_argument("key_id", help="as `keys list` shows it")
    for command, run in ((add, _add), (listing, _list), (revoke, _revoke)):
        add_settings(command, ["data_dir"])
        command.set_defaults(run=run)


def _add(arguments: Arguments) -> int:
    from tinkercloud.storage.keys import KeyStore

    with closing(KeyStore(config_of(arguments).data_dir)) as keys:
        key = keys.add(arguments["user"], name=arguments["name"], note=arguments["note"])
        say(f"export TINKER_API_KEY={key}")
    return 0


def _list(arguments: Arguments) -> int:
    from tinkercloud.storage.keys import KeyStore

    with closing(KeyStore(config_of(arguments).data_dir)) as keys:
        names = keys.names()
        for key_id, user, created_at in keys.list():
            date = datetime.fromtimestamp(created_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
            say("  ".join([key_id, date, user, *([names[key_id]] if key_id in names else [])]))
    return 0


def _revoke(arguments: Arguments) -> int:
    from tinkercloud.storage.keys import KeyStore

    with closing(KeyStore(config_of(arguments).data_dir)) as keys:
        if keys.revoke(arguments["key_id"]):
            return 0
    complain(f"there is no key {arguments['key_id']!r}")
    return 1
