"""The coordinator's side of a worker: starts it where it may, tunnels to it, asks how it is."""

import json
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from tinkercloud.addresses import is_loopback, read_key
from tinkercloud.errors import ConfigError
from tinkercloud.pool.child_process import ChildProcess, free_port
from tinkercloud.pool.layer_plan import Device
from tinkercloud.pool.pool_file import Worker
from tinkercloud.pool.worker import DeviceHealth

HEALTH_TIMEOUT_S = 2.0
LOST_AFTER = 2
"""Questions in a row without an answer: a worker that is gone is named within five seconds."""
SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ExitOnForwardFailure=yes"),
    *("-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=3"),
)


@dataclass(frozen=True, slots=True)
class WorkerLost(Exception):
    worker: str
    reason: str

    def __str__(self) -> str:
        return f"worker {self.worker} is dead: {self.reason}"


class WorkerLink:
    """`start`, then `check` again and again until it raises WorkerLost; then `start` anew."""

    def __init__(self, worker: Worker, folder: Path):
        self.worker = worker
        self.log = folder / f"worker-{worker.name}.log"
        self._folder = folder
        self._process: ChildProcess | None = None
        self._http: httpx.Client | None = None
        self._ports: Mapping[int, int] = {}
        self._misses = 0
        self._started: dict[str, int] = {}
        self._health: list[DeviceHealth] = []

    def start(self) -> None:
        """Begins to; `is_up` tells when it is."""
        self.end()
        self._misses, self._started, self._health = 0, {}, []
        worker = self.worker
        ports = range(worker.port, worker.port + worker.num_ports)
        self._ports = {port: free_port() if worker.start == "ssh" else port for port in ports}
        if worker.start == "local":
            command = [sys.executable, "-m", "tinkercloud", *self._worker_arguments()]
            command += ["--log-dir", str(self._folder)]
            self._process = ChildProcess(command, self.log, has_stdin=True)
        elif worker.start == "ssh":
            tunnels = [
                word
                for remote, local in self._ports.items()
                for word in ("-L", f"127.0.0.1:{local}:127.0.0.1:{remote}")
            ]
            remote = shlex.join([worker.command, *self._worker_arguments()])
            command = [*SSH, *tunnels, worker.host, remote]
            self._process = ChildProcess(command, self.log, has_stdin=True)

    def end(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None
        if self._process is not None:
            self._process.end()
            self._process = None

    def is_up(self) -> bool:
        """Whether all of its devices answer. Raises WorkerLost where it ended, and ConfigError for
        what no waiting mends."""
        self._check_process()
        try:
            self._health = self._ask()
        except httpx.HTTPError:
            return False
        listed = {health.device for health in self._health}
        missing = [gpu.device for gpu in self.worker.gpus if gpu.device not in listed]
        if missing:
            raise ConfigError(
                f"worker {self.worker.name} has no {', '.join(missing)}; it has: "
                f"{', '.join(sorted(listed))}; correct gpus in the pool's file"
            )
        self._started = {health.device: health.started for health in self._health}
        return all(health.is_alive for health in self._health)

    def check(self) -> None:
        """Raises WorkerLost."""
        self._check_process()
        try:
            self._health = self._ask()
            self._misses = 0
        except httpx.ConnectError as error:
            raise WorkerLost(
                self.worker.name, f"nothing listens there any more ({error})"
            ) from None
        except httpx.HTTPError as error:
            self._misses += 1
            if self._misses >= LOST_AFTER:
                seconds = LOST_AFTER * HEALTH_TIMEOUT_S
                raise WorkerLost(
                    self.worker.name, f"no answer for {seconds:.0f} s ({type(error).__name__})"
                ) from None
            return
        for health in self._health:
            if not health.is_alive:
                raise WorkerLost(self.worker.name, f"{health.device}: {health.reason}")
            if health.started != self._started.get(health.device, health.started):
                raise WorkerLost(self.worker.name, f"{health.device}: its RPC server was restarted")

    def restart_servers(self) -> None:
        """Asks for new RPC servers, and waits until they are up. Raises WorkerLost."""
        before = {health.device: health.started for health in self._ask_or_lose()}
        self._client().post("/restart").raise_for_status()
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            health = {each.device: each for each in self._ask_or_lose()}
            if all(
                health[name].started > n and health[name].is_alive for name, n in before.items()
            ):
                self._started = {name: each.started for name, each in health.items()}
                return
            time.sleep(0.2)
        raise WorkerLost(self.worker.name, "its RPC servers did not come back within 30 s")

    def devices(self, num_sharing: int = 1) -> list[Device]:
        """As the pool's file has them, else as the worker says. num_sharing: workers that say the
        same RAM is theirs."""
        first = self.worker.port + 1  # not what the worker says: a tunnel may have other numbers
        answered = {each.device: (first + i, each) for i, each in enumerate(self._health)}
        devices = []
        for gpu in self.worker.gpus:
            if gpu.device not in answered:
                continue
            port, health = answered[gpu.device]
            memory = gpu.memory
            if memory is None:
                memory = health.free_bytes // (num_sharing if gpu.device == "CPU" else 1)
            endpoint = f"{self._address()}:{self._ports.get(port, port)}"
            devices.append(Device(self.worker.name, gpu.device, memory, endpoint))
        return devices

    def is_on_machine_of(self, other: "WorkerLink") -> bool:
        return self.worker.host == other.worker.host

    @property
    def shares_ram(self) -> bool:
        return any(gpu.device == "CPU" and gpu.memory is None for gpu in self.worker.gpus)

    @property
    def protocols(self) -> dict[str, str]:
        """Of RPC, for each device."""
        return {health.device: health.protocol for health in self._health}

    def _ask(self) -> list[DeviceHealth]:
        answer = self._client().get("/health")
        if answer.status_code == 401:
            raise ConfigError(
                f"worker {self.worker.name} wants its key: name the file that holds it as key_file"
            )
        try:
            return [
                DeviceHealth(**device) for device in answer.raise_for_status().json()["devices"]
            ]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ConfigError(
                f"what answers at {self._address()}:{self._ports[self.worker.port]} is no pool "
                "worker of this version; is the port another program's?"
            ) from None

    def _ask_or_lose(self) -> list[DeviceHealth]:
        try:
            return self._ask()
        except httpx.HTTPError as error:
            raise WorkerLost(self.worker.name, f"no answer ({type(error).__name__})") from None

    def _client(self) -> httpx.Client:
        """One from start to end: making one takes milliseconds, and it is asked every second."""
        if self._http is not None:
            return self._http
        url = f"http://{self._address()}:{self._ports[self.worker.port]}"
        headers = {}
        if self.worker.key_file is not None:
            headers["Authorization"] = f"Bearer {read_key(self.worker.key_file)}"
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=HEALTH_TIMEOUT_S, trust_env=False
        )
        return self._http

    def _address(self) -> str:
        if self.worker.start == "ssh" or is_loopback(self.worker.host):
            return "127.0.0.1"
        return self.worker.host

    def _check_process(self) -> None:
        if self._process is not None and self._process.status is not None:
            end = self._process.log_end(3).replace("\n", " | ")
            raise WorkerLost(self.worker.name, f"it ended: {end or self._process.status}")

    def _worker_arguments(self) -> list[str]:
        worker = self.worker
        words = ["pool", "worker", "--listen", f"127.0.0.1:{worker.port}", "--until-stdin-ends"]
        for gpu in worker.gpus:
            words += ["--device", gpu.device]
        if worker.rpc_server is not None:
            words += ["--rpc-server", worker.rpc_server]
        if worker.threads is not None:
            words += ["--threads", str(worker.threads)]
        if worker.key_file is not None and worker.start == "local":
            words += ["--key-file", str(worker.key_file)]
        return words + (["--cache"] if worker.cache else [])
