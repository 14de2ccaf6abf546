"""Simulated nodes of one Ray: `ray start` on loopback, each with ports of its own."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from tests.cluster.ray_cluster import STORE_BYTES
from tests.ports import reserved_port
from tests.waiting import wait_for_line

RAY = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")
LIMIT_S = 240.0


def environment(home: Path, **variables: str) -> dict[str, str]:
    """Of a user on a machine of their own: no mode or token but those given."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH_")}
    return {**inherited, "HOME": str(home), **variables}


class Nodes:
    """Of one Ray. Folders of sockets are short-named: their paths may have 107 bytes."""

    def __init__(self, folder: Path, home: Path):
        self.home = home
        self.address = f"127.0.0.1:{reserved_port()}"
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start_head(self, **variables: str) -> None:
        port = self.address.rpartition(":")[2]
        self._start(["--head", "--port", port, "--include-dashboard", "false"], variables)

    def join(self, **variables: str) -> None:
        self._start(["--address", self.address], variables)

    def _start(self, options: list[str], variables: Mapping[str, str]) -> None:
        """Raises AssertionError with what `ray start` said, where it ended."""
        number = len(self._processes)
        log = self._folder / f"log{number}"
        ports = {
            name: str(reserved_port())
            for name in ("node-manager-port", "object-manager-port", "dashboard-agent-listen-port")
        }
        command = [
            *(*RAY, "start", "--block", *options, "--node-ip-address", "127.0.0.1"),
            *("--num-cpus", "2", "--object-store-memory", str(STORE_BYTES)),
            *("--min-worker-port", "0", "--max-worker-port", "0", "--disable-usage-stats"),
            *(text for name, port in ports.items() for text in (f"--{name}", port)),
            *("--temp-dir", str(self._folder / f"n{number}")) * ("--head" in options),
        ]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment(self.home, **variables),
            )
        self._processes.append(process)
        wait_for_line("Ray runtime started", log, process)

    def end(self) -> None:
        """At once: `ray start --block` would give each of its processes seconds."""
        started = [psutil.Process(process.pid) for process in self._processes]
        below = [child for process in started for child in process.children(recursive=True)]
        for process in (*started, *below):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in self._processes:
            process.wait()


@contextlib.contextmanager
def ray_nodes(home: Path) -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        nodes = Nodes(Path(folder), home)
        try:
            yield nodes
        finally:
            nodes.end()


def ray(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RAY, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=environment(home, **variables),
    )
