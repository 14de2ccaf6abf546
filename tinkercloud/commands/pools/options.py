"""`tinkercloud pool`: its commands and their options; nothing heavy is imported before one runs."""

import argparse
from collections.abc import Callable
from pathlib import Path

from tinkercloud.commands.options import Arguments, say

POOL_FILE = Path("pool.yaml")


def add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[Arguments], int], text: str, *, reads_file: bool = True
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text)
        if reads_file:
            added.add_argument(
                "--file", type=Path, default=POOL_FILE, help=f"the pool's YAML [{POOL_FILE}]"
            )
        added.set_defaults(run=run)
        return added

    _add_init(command("init", _init, "write the YAML of a pool"))
    plan = command("plan", _plan, "which layers would lie where, from the YAML alone")
    plan.add_argument("model", nargs="?", help="of the YAML [its first]")
    inspect = command("inspect", _inspect, "what a GGUF file holds, by layers", reads_file=False)
    inspect.add_argument("path", type=Path)
    inspect.add_argument("--context", type=int, default=4096, help="tokens of the cache [4096]")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor too")


def _add_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", action="append", metavar="NAME=PATH", help="a GGUF file; may be repeated"
    )
    parser.add_argument(
        "--worker",
        action="append",
        metavar="SPEC",
        help="local, [USER@]HOST (started by ssh) or HOST:PORT (started by hand), then its devices "
        "and what they lend: laptop,CUDA0=8GiB,CPU=4GiB; may be repeated",
    )
    parser.add_argument("--memory", help="of this machine's own RAM for layers, as 4GiB [none]")
    parser.add_argument("--port", type=int, help="of the endpoint [8720]")
    parser.add_argument(
        "--unencrypted-network",
        action="store_true",
        help="workers HOST:PORT may be reached without a tunnel: RPC has no authentication",
    )
    parser.add_argument("--force", action="store_true", help="overwrite the file")


def _init(arguments: Arguments) -> int:
    from tinkercloud.commands.pools.setup import write_pool

    for line in write_pool(arguments):
        say(line)
    return 0


def _plan(arguments: Arguments) -> int:
    from tinkercloud.commands.pools.views import planned_lines

    for line in planned_lines(arguments["file"], arguments["model"]):
        say(line)
    return 0


def _inspect(arguments: Arguments) -> int:
    from tinkercloud.commands.pools.views import model_lines

    for line in model_lines(arguments["path"], arguments["context"], arguments["tensors"]):
        say(line)
    return 0
