"""A real server in a process of its own, for the tests that talk to one."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.ports import reserved_port

ROOT = Path(__file__).resolve().parent.parent
START_LIMIT_S = 300.0  # of a busy machine that reads all files for the first time
STOP_LIMIT_S = 120.0  # longer than `drain_s`

# What every process of a test gets: nothing leaves this machine, nothing is picked up from it.
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "TINKER_TELEMETRY": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


class ServerDidNotStart(AssertionError):
    """The text ends with what the server wrote."""


@dataclass
class Server:
    """`tinkercloud serve` with its own data directory; the port survives `restart`.

    python, folder: the interpreter, and where it runs and finds the code; by default this checkout.
    module: the program, which takes the arguments of `tinkercloud`.
    """

    arguments: Sequence[str]
    data_dir: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    folder: Path = ROOT
    module: str = "tinkercloud"
    port: int = field(default_factory=reserved_port)
    api_key: str = ""
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.data_dir.parent / f"{self.data_dir.name}.log"

    @property
    def sdk_environment(self) -> dict[str, str]:
        """What a client needs in its environment."""
        return {**QUIET, "TINKER_BASE_URL": self.base_url, "TINKER_API_KEY": self.api_key}

    def http(self, *, timeout_s: float = 60.0, authenticated: bool = True) -> httpx.Client:
        """A plain client on the server's root, with the key if `authenticated`."""
        headers = {"X-API-Key": self.api_key} if authenticated else {}
        return httpx.Client(
            base_url=self.base_url, headers=headers, timeout=timeout_s, trust_env=False
        )

    def start(self) -> None:
        """Start, and return when it serves; ServerDidNotStart with its output otherwise."""
        self.launch()
        self.await_ready()

    def launch(self) -> None:
        """Start, and return at once."""
        command = [self.python, "-m", self.module, "serve", "--port", str(self.port)]
        command += ["--data-dir", str(self.data_dir), *self.arguments]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TINKERCLOUD_")}
        environment = {**inherited, **QUIET, "PYTHONPATH": str(self.folder), **self.environment}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=self.folder
            )

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it as an operator would; the exit status. Killed when it does not end in time."""
        process = self.process
        assert process is not None
        if process.poll() is None:
            process.send_signal(how)
        try:
            return process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the server did not stop; it wrote:\n{self.output()}") from None

    def kill(self) -> None:
        """End it as a power cut would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def restart(self, *, how: signal.Signals = signal.SIGTERM) -> None:
        """Stop and start on the same port and data."""
        if how is signal.SIGKILL:
            self.kill()
        else:
            self.stop(how)
        self.start()

    def engine_pid(self) -> int:
        """The process id of its engine, a child of it; needs Linux's /proc."""
        pid = self.find_engine()
        assert pid is not None, "the server has no engine among its children"
        return pid

    def find_engine(self) -> int | None:
        """As `engine_pid`; None while there is none."""
        assert self.process is not None
        tasks = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with suppress(OSError):  # a process that has ended meanwhile
            for child in tasks.read_text().split():
                if b"process.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        return None

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def await_ready(self) -> None:
        """Of `launch`: ServerDidNotStart where it does not serve in time."""
        assert self.process is not None
        deadline = time.monotonic() + START_LIMIT_S
        while (ready := re.search(r"^ready: http://\S+:(\d+)", self.output(), re.M)) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                status = self.process.poll()
                self.kill()
                raise ServerDidNotStart(f"exit status {status}; it wrote:\n{self.output()}")
            time.sleep(0.02)
        self.port = int(ready[1])
        if key := re.search(r"^export TINKER_API_KEY=(\S+)", self.output(), re.M):
            self.api_key = key[1]


@contextmanager
def start_server(
    *arguments: str, data_dir: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server for the length of the block; ended by its process id."""
    with running(Server(arguments, data_dir, environment or {})) as server:
        yield server


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """This server, started for the length of the block."""
    server.start()
    try:
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.stop()


@contextmanager
def command(*words: str, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """`tinkercloud` with these words, which writes to the log; killed at the end of the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tinkercloud", *words],
            cwd=ROOT, env=os.environ | QUIET, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def backend_under_test() -> str:
    """What TINKERCLOUD_TEST_BACKEND names; without it, the default one."""
    return os.environ.get("TINKERCLOUD_TEST_BACKEND", "embedded")


def backend_arguments() -> tuple[str, ...]:
    """Flags of the tested backend."""
    if backend_under_test() == "cluster":
        from tests.cluster.cpu.serving import cluster_arguments

        return cluster_arguments()
    return ("--backend", backend_under_test())
