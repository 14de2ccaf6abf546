"""`tinkercloud pool worker`: lends the devices of this machine."""

import os
import signal
import threading
from pathlib import Path

from tinkercloud import logs
from tinkercloud.addresses import is_loopback, read_key
from tinkercloud.commands.options import Arguments, complain, config_of, say
from tinkercloud.errors import ConfigError
from tinkercloud.pool.binaries import RPC_SERVER, find_program
from tinkercloud.pool.worker import PoolWorker, WorkerSettings

OPEN_NETWORK = (
    "llama.cpp's RPC has no authentication and no encryption: whoever reaches {host} can use this "
    "worker, read what it computes and attack it"
)


def run_worker(arguments: Arguments) -> int:
    """Until SIGTERM or SIGINT. Raises ConfigError."""
    config = config_of(arguments)
    logs.configure(config.log_level, config.log_format)
    settings = worker_settings(arguments)
    if not is_loopback(settings.host):
        complain(f"warning: {OPEN_NETWORK.format(host=settings.host)}")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    if arguments["until_stdin_ends"]:
        threading.Thread(target=_await_end_of_stdin, args=(ended,), daemon=True).start()
    folder: Path = arguments["log_dir"] or config.data_dir / "pools" / "worker"
    worker = PoolWorker(settings, folder)
    for health in worker.health():
        say(f"{health.device}: RPC {health.protocol} on port {health.port}, log in {folder}")
    say(f"ready: {settings.host}:{settings.port}")
    worker.run(ended)
    return 0


def worker_settings(arguments: Arguments) -> WorkerSettings:
    """Raises ConfigError."""
    host, _, port = str(arguments["listen"]).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{arguments['listen']!r} is not HOST:PORT")
    key_file: Path | None = arguments["key_file"]
    if not is_loopback(host):
        if not arguments["unencrypted_network"]:
            raise ConfigError(
                f"{OPEN_NETWORK.format(host=host)}. Listen on 127.0.0.1 behind a tunnel (ssh -L), "
                "or say --unencrypted-network"
            )
        if key_file is None:
            raise ConfigError(f"listening on {host} needs a key: write one and give its --key-file")
    return WorkerSettings(
        host,
        int(port),
        tuple(arguments["device"] or ("CPU",)),
        find_program(RPC_SERVER, arguments["rpc_server"]),
        None if key_file is None else read_key(key_file),
        arguments["threads"],
        arguments["cache"],
    )


def _await_end_of_stdin(ended: threading.Event) -> None:
    while os.read(0, 1):  # sys.stdin would be locked when the interpreter ends
        pass
    ended.set()
