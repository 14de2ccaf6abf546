"""`tinkercloud keys`: make, list, change and revoke API keys."""

import argparse
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from tinkercloud.commands.options import Arguments, add_settings, complain, config_of, say


def add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser("add", help="make a key and print it, this once")
    add.add_argument("user", nargs="?", default="default", help="whose work it gives access to")
    add.add_argument("--name", default="", help="tinker-cli-NAME may revoke itself")
    add.add_argument("--note", default="", help="what it is for")
    _add_rights(add, "user")
    listing = commands.add_parser("list", help="ids, dates, users, roles, quotas and names")
    change = commands.add_parser("set", help="change a key's role and quotas")
    change.add_argument("key_id", help="as `keys list` shows it")
    _add_rights(change, None)
    revoke = commands.add_parser("revoke", help="make a key invalid")
    revoke.add_argument("key_id", help="as `keys list` shows it")
    for command, run in ((add, _add), (listing, _list), (change, _set), (revoke, _revoke)):
        add_settings(command, ["data_dir"])
        command.set_defaults(run=run)


def _add_rights(parser: argparse.ArgumentParser, role: str | None) -> None:
    parser.add_argument(
        "--role",
        choices=("admin", "user", "read-only"),
        default=role,
        help="read-only: lists, reads and downloads; admin: sees and ends what is anybody's",
    )
    parser.add_argument(
        "--quota",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="models, memory_bytes, queued, checkpoint_bytes or tokens_per_minute; none: no limit; "
        "repeatable",
    )


def _limits(arguments: Arguments) -> dict[str, str]:
    return {name: text for name, _, text in (q.partition("=") for q in arguments["quota"])}


def _add(arguments: Arguments) -> int:
    from tinkercloud.storage.keys import UNLIMITED, KeyStore

    quota = UNLIMITED.changed(_limits(arguments))
    with closing(KeyStore(config_of(arguments).data_dir)) as keys:
        key = keys.add(
            arguments["user"],
            name=arguments["name"],
            note=arguments["note"],
            role=arguments["role"],
            quota=quota,
        )
        say(f"export TINKER_API_KEY={key}")
    return 0


def _list(arguments: Arguments) -> int:
    _show(config_of(arguments).data_dir)
    return 0


def _show(data_dir: Path, key_id: str | None = None) -> None:
    """key_id None: of all keys."""
    from tinkercloud.storage.keys import KeyStore

    with closing(KeyStore(data_dir)) as keys:
        for key in keys.list():
            if key_id not in (None, key.key_id):
                continue
            date = datetime.fromtimestamp(key.created_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
            quota = [f"{name}={value}" for name, value in key.quota.limits().items()]
            say("  ".join([key.key_id, date, key.user, key.role, *quota, key.name]).rstrip())


def _set(arguments: Arguments) -> int:
    from tinkercloud.storage.keys import KeyStore

    data_dir, key_id = config_of(arguments).data_dir, arguments["key_id"]
    with closing(KeyStore(data_dir)) as keys:
        key = next((key for key in keys.list() if key.key_id == key_id), None)
        if key is None:
            return _unknown(key_id)
        quota = key.quota.changed(_limits(arguments))
        keys.set(key_id, role=arguments["role"] or key.role, quota=quota)
    _show(data_dir, key_id)
    return 0


def _revoke(arguments: Arguments) -> int:
    from tinkercloud.storage.keys import KeyStore

    with closing(KeyStore(config_of(arguments).data_dir)) as keys:
        if keys.revoke(arguments["key_id"]):
            return 0
    return _unknown(arguments["key_id"])


def _unknown(key_id: str) -> int:
    complain(f"there is no key {key_id!r}; `tinkercloud keys list` shows them")
    return 1
