"""Processes of a benchmark: servers of peers, and who may run while another one is measured.

Only the standard library is needed here: scripts of peers import it in the peers' environments.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from benchmarks.lib.peers import STOP_LIMIT_S, Unavailable, peer_environment

START_LIMIT_S = 600.0  # at its first start vLLM compiles for minutes


def prepare_process() -> None:
    """At the start of a benchmark: SIGTERM ends it with all that it started; threads of our server
    that wait sleep, since client and server share the cores; nothing is fetched."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def give_way() -> None:
    """Of a process that would be on another machine: what it computes must not keep the server from
    its cores."""
    os.nice(10)


class HasPid(Protocol):
    @property
    def pid(self) -> int | None: ...


def families() -> dict[int, list[int]]:
    """The children of each process."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    return children


def signal_family(pid: int | None, what: signal.Signals) -> None:
    """To a process and all below it. On Linux; elsewhere nothing happens."""
    children, left = families(), [] if pid is None else [pid]
    while left:
        process = left.pop()
        left += children.get(process, [])
        with suppress(ProcessLookupError):
            os.kill(process, what)


@contextmanager
def awake(contender: HasPid) -> Iterator[None]:
    """A contender that is not measured is stopped: some look for work all the time, which takes a
    core's time from others."""
    signal_family(contender.pid, signal.SIGCONT)
    try:
        yield
    finally:
        signal_family(contender.pid, signal.SIGSTOP)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServerProcess:
    """A peer's server, ended by its process group."""

    def __init__(
        self, command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None
    ):
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**peer_environment(), **(environment or {})},
                cwd=log.parent,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """It leads a session: whatever it started is in it."""
        return self._process.pid

    def await_ready(self, url: str, limit_s: float = START_LIMIT_S) -> None:
        """Until `url` answers with 200; Unavailable with the end of its output otherwise."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(urllib.error.URLError, OSError):
                answer: Any
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if answer.status == 200:
                        return
            time.sleep(0.1)
        status = self._process.poll()
        self.stop()
        how = f"exit status {status}" if status is not None else f"not ready in {limit_s:.0f} s"
        raise Unavailable(f"did not start ({how}): {self.last_words()}")

    def last_words(self) -> str:
        """The last line that tells of an error, or the last line."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines()]
        telling = [line for line in lines if "rror" in line] or [line for line in lines if line]
        return telling[-1][-200:] if telling else "it wrote nothing"

    def stop(self) -> None:
        if self._process.poll() is not None:
            return
        os.killpg(self._process.pid, signal.SIGTERM)
        os.killpg(self._process.pid, signal.SIGCONT)  # a stopped process does not see SIGTERM
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
