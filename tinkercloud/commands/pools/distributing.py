"""`tinkercloud pool seed | fetch | distribute`: a model's file to other machines."""

import shutil
import signal
import subprocess
import threading
from pathlib import Path

from tinkercloud.addresses import is_loopback, read_key
from tinkercloud.commands.options import Arguments, say, say_progress
from tinkercloud.errors import ConfigError
from tinkercloud.pool.distribution.download import Download, fetch_manifest
from tinkercloud.pool.distribution.manifest import make_manifest
from tinkercloud.pool.distribution.peer import Peer
from tinkercloud.pool.distribution.piece_store import PieceStore
from tinkercloud.pool.model_file import model_parts
from tinkercloud.pool.pool_file import load_pool


def seed(arguments: Arguments) -> int:
    """Until SIGTERM or SIGINT. Raises ConfigError."""
    path: Path = arguments["path"]
    host, port, key = _listening(arguments)
    manifest = make_manifest(path, report=say_progress)
    store = PieceStore(path, manifest)
    peer = Peer(store, host, port, key)
    say(f"{manifest.name}: {manifest.num_pieces} pieces, digest {manifest.digest}")
    say(f"ready: {host}:{peer.port} (tinkercloud pool fetch THIS_MACHINE:{peer.port})")
    _await_signal()
    peer.close()
    store.close()
    return 0


def fetch(arguments: Arguments) -> int:
    """Raises ConfigError."""
    host, port, key = _listening(arguments)
    addresses = tuple(arguments["peer"])
    manifest = fetch_manifest(addresses, key, arguments["digest"])
    store = PieceStore(arguments["to"] / manifest.name, manifest)
    peer = Peer(store, host, port, key)
    say(f"{manifest.name}: {len(store.have)} of {manifest.num_pieces} pieces are here")
    say(f"serving them at {host}:{peer.port}")
    try:
        Download(store, addresses, key, peer.port, say_progress).run()
        say(f"whole: {store.path}")
        if arguments["stay"]:
            _await_signal()
    finally:
        peer.close()
        store.close()
    return 0


def distribute(arguments: Arguments) -> int:
    """By rsync to every worker that is reached by ssh. Raises ConfigError."""
    pool = load_pool(arguments["file"])
    model = pool.model(arguments["model"])
    rsync = shutil.which("rsync")
    if rsync is None:
        raise ConfigError("rsync is not here; install it, or use `pool seed` and `pool fetch`")
    hosts = [worker.host for worker in pool.workers if worker.start == "ssh"]
    if not hosts:
        raise ConfigError("no worker has start: ssh; use `pool seed` here and `pool fetch` there")
    failed = []
    for host in dict.fromkeys(hosts):
        say(f"to {host}:{arguments['to']}")
        command = [rsync, "--archive", "--partial", "--info=progress2", "--mkpath"]
        command += [*map(str, model_parts(model.path)), f"{host}:{arguments['to']}/"]
        if subprocess.run(command).returncode:
            failed.append(host)
    if failed:
        raise ConfigError(
            f"rsync failed for {', '.join(failed)}; repeat the command, which goes on from there"
        )
    return 0


def _listening(arguments: Arguments) -> tuple[str, int, str | None]:
    host, _, port = str(arguments["listen"]).rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{arguments['listen']!r} is not HOST:PORT")
    key_file: Path | None = arguments["key_file"]
    if key_file is None and not is_loopback(host):
        raise ConfigError(
            f"listening on {host} needs a key: write one into a file, and give its --key-file to "
            "every peer"
        )
    return host, int(port), None if key_file is None else read_key(key_file)


def _await_signal() -> None:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
