"""A worker: an RPC server of llama.cpp for each device, and HTTP that says how they are.

The RPC server serves one connection at a time, and its queue holds one more: asking it whether it
lives would block the coordinator. So the worker answers for it, on a port of its own.
"""

import contextlib
import hmac
import json
import re
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tinkercloud.errors import ConfigError
from tinkercloud.pool.child_process import ChildProcess

START_S = 60.0
_POLL_S = 0.2
_PROTOCOL = re.compile(r"Starting RPC server v(\S+)")
_MEMORY = re.compile(r"\((\d+) MiB, (\d+) MiB free\)")
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """port: of HTTP; the devices' RPC servers have those that follow. key: what callers send."""

    host: str
    port: int
    devices: tuple[str, ...]
    program: Path
    key: str | None = None
    threads: int | None = None
    cache: bool = False


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """started: how often its RPC server was; a coordinator's tensors are lost with each."""

    device: str
    port: int
    is_alive: bool
    free_bytes: int
    started: int
    protocol: str
    reason: str = ""


class RpcServer:
    """Of one device. Raises ConfigError where it does not start."""

    def __init__(self, settings: WorkerSettings, index: int, log: Path):
        self._settings = settings
        self.device = settings.devices[index]
        self.port = settings.port + 1 + index
        self._log = log
        self._started = 0
        self.start()

    def start(self) -> None:
        settings = self._settings
        command = [str(settings.program), "-H", settings.host, "-p", str(self.port)]
        command += ["-d", self.device]
        if settings.threads is not None:
            command += ["-t", str(settings.threads)]
        if settings.cache:
            command += ["-c"]
        if _is_taken(settings.host, self.port):
            raise ConfigError(
                f"port {self.port}, for {self.device}'s RPC server, is taken; "
                "choose another --listen"
            )
        self._log.unlink(missing_ok=True)
        self._process = ChildProcess(command, self._log)
        self._started += 1
        self._await_port()
        text = self._log.read_text(errors="replace")
        protocol, memory = _PROTOCOL.search(text), _MEMORY.search(text)
        self._protocol = "" if protocol is None else protocol[1]
        self._free_bytes = 0 if memory is None else int(memory[2]) * _MIB

    def _await_port(self) -> None:
        """A connection also makes it write out what it has said so far."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.status is not None:
                raise ConfigError(
                    f"the RPC server of {self.device} ended at once: {self._process.log_end()}"
                )
            if _is_taken(self._settings.host, self.port):
                while "Accepted" not in self._log.read_text(errors="replace"):
                    if time.monotonic() > deadline or self._process.status is not None:
                        break
                    time.sleep(_POLL_S)
                return
            time.sleep(_POLL_S)
        self._process.end()
        raise ConfigError(f"the RPC server of {self.device} did not listen within {START_S:.0f} s")

    def end(self) -> None:
        self._process.end()

    def health(self) -> DeviceHealth:
        status = self._process.status
        free_bytes = self._free_bytes
        if self.device == "CPU":  # the RPC server tells the whole machine's
            free_bytes = min(free_bytes, available_memory() or free_bytes)
        reason = "" if status is None else f"its RPC server ended with status {status}"
        return DeviceHealth(
            self.device, self.port, status is None, free_bytes, self._started, self._protocol,
            reason,
        )  # fmt: skip


class PoolWorker:
    """All devices of a machine, and HTTP. `run` returns when `ended` is set."""

    def __init__(self, settings: WorkerSettings, folder: Path):
        self._settings = settings
        self._servers = list[RpcServer]()
        self._restarts: set[str] = set()
        try:
            self._http = _Http((settings.host, settings.port), self)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror}"
            ) from None
        try:
            for index, device in enumerate(settings.devices):
                log = folder / f"rpc-{settings.port}-{device}.log"
                self._servers.append(RpcServer(settings, index, log))
        except BaseException:  # Ctrl-C too: the servers are processes of their own
            self.close()
            raise

    def run(self, ended: threading.Event) -> None:
        """In the main thread, which alone may start processes."""
        threading.Thread(target=self._http.serve_forever, name="http", daemon=True).start()
        while not ended.wait(_POLL_S):
            for server in self._servers:
                if server.device in self._restarts:
                    server.end()
                    server.start()
                    self._restarts.discard(server.device)
        self._http.shutdown()
        self.close()

    def close(self) -> None:
        self._http.server_close()
        for server in self._servers:
            server.end()

    def is_allowed(self, authorization: str) -> bool:
        key = self._settings.key
        return key is None or hmac.compare_digest(authorization.encode(), f"Bearer {key}".encode())

    def health(self) -> list[DeviceHealth]:
        return [server.health() for server in self._servers]

    def restart(self, devices: Sequence[str]) -> None:
        """Soon; `started` of their health tells when. Frees what a coordinator that died left."""
        self._restarts |= {server.device for server in self._servers} & set(devices)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], worker: PoolWorker):
        self.worker = worker
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Http
    timeout = 30.0

    def do_GET(self) -> None:
        if self._is_allowed() and self.path == "/health":
            self._answer(200, {"devices": [asdict(each) for each in self.server.worker.health()]})
        elif self._is_allowed():
            self._answer(404, {"error": "there is GET /health and POST /restart"})

    def do_POST(self) -> None:
        if not self._is_allowed():
            return
        if self.path != "/restart":
            self._answer(404, {"error": "there is GET /health and POST /restart"})
            return
        self.server.worker.restart([health.device for health in self.server.worker.health()])
        self._answer(202, {})

    def _is_allowed(self) -> bool:
        if self.server.worker.is_allowed(self.headers.get("Authorization", "")):
            return True
        self._answer(401, {"error": "this worker wants its key: name its file as key_file"})
        return False

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """A line for each second of a coordinator's question would say nothing."""


def available_memory() -> int | None:
    """Of this machine's RAM, what programs could take; None where the system does not tell."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.M)
    return None if match is None else int(match[1]) * 1024


def _is_taken(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2.0):
            return True
    except OSError:
        return False
