"""Where a worker listens, for whom, and until when: the same for all kinds of workers."""

import argparse
import logging
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkercloud.commands.options import Arguments, say

if TYPE_CHECKING:
    from tinkercloud.addresses import Address
    from tinkercloud.speculative.remote.connection import ServerSecurity
    from tinkercloud.speculative.remote.methods import StreamMethod
    from tinkercloud.speculative.remote.stream_worker import StreamWorker

logger = logging.getLogger(__name__)

STATS_S = 60.0


def add_listening_options(parser: argparse.ArgumentParser, address: str) -> None:
    parser.add_argument("--listen", default=address, metavar="HOST:PORT", help=f"[{address}]")
    parser.add_argument("--key-file", type=Path, help="holds the key that clients have to send")
    parser.add_argument("--tls-certificate", type=Path, help="PEM; with --tls-key: TLS")
    parser.add_argument("--tls-key", type=Path, help="the certificate's private key, PEM")


@dataclass(frozen=True, slots=True)
class Listening:
    address: "Address"
    security: "ServerSecurity"

    @classmethod
    def of(cls, arguments: Arguments) -> "Listening":
        """Raises ConfigError, before a model is read for nothing."""
        from tinkercloud.addresses import parse_address, read_key
        from tinkercloud.speculative.remote.connection import ServerSecurity

        key_file: Path | None = arguments["key_file"]
        address = parse_address(arguments["listen"])
        security = ServerSecurity(
            None if key_file is None else read_key(key_file),
            arguments["tls_certificate"],
            arguments["tls_key"],
        )
        security.check(address)
        return cls(address, security)

    def serve(self, worker: "StreamWorker[Any]", method: "StreamMethod", use: str) -> None:
        """Until an interrupt or SIGTERM. use: the command that asks the worker, with {port}."""
        from tinkercloud.speculative.remote.service import WorkerServer

        server = WorkerServer.start(worker, method, self.address, self.security)
        if not (self.address.is_loopback or self.security.is_encrypted):
            logger.warning(
                "texts and the key travel unencrypted: give --tls-certificate and --tls-key, or "
                "listen on 127.0.0.1 behind a tunnel"
            )
        say(f"ready: {self.address.host}:{server.port} ({use.format(port=server.port)})")
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        before: dict[str, int] = {}
        while not ended.wait(STATS_S):
            if worker.stats() != before:
                before = worker.stats()
                logger.info("%s", ", ".join(f"{name} {n}" for name, n in before.items()))
        server.stop()
