"""What every contender of the sampling benchmark is asked, and what it answers.

Only the standard library is needed here, so that a peer's environment needs only its own packages.
"""

import json
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

START_LIMIT_S = 180.0
STOP_LIMIT_S = 15.0


class Unavailable(Exception):
    """A contender that is not installed or does not run here; the text says why."""


@dataclass(frozen=True)
class Load:
    """Requests that arrive at once: one for each prompt, `num_samples` samples of each, exactly
    `max_tokens` new tokens of each sample. Temperature 1 over the whole vocabulary, or greedy."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    num_samples: int = 1
    greedy: bool = False

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.num_samples

    @property
    def new_tokens(self) -> int:
        return self.num_sequences * self.max_tokens

    @property
    def prompt_tokens(self) -> int:
        """A shared prompt counted once."""
        return sum(map(len, self.prompts))

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts)) + self.max_tokens


@dataclass
class Outcome:
    """samples: new tokens of each sequence, in the order of the prompts. failed: sequences that did
    not come, or came with the wrong number of tokens. first_s: seconds from the submission to the
    first token, of each sequence where it can be seen; gaps_s: between two tokens of a sequence."""

    wall_s: float
    samples: list[list[int]]
    failed: int = 0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


class Contender(Protocol):
    name: str
    version: str

    @property
    def pid(self) -> int | None:
        """Of its process, which may have others below it; None where none runs."""
        ...

    async def prepare(self, load: Load) -> None:
        """Get ready for loads of this size; not timed."""
        ...

    async def generate(self, load: Load) -> Outcome: ...

    async def latency(self, load: Load) -> Outcome | None:
        """The same with first_s and, where they can be seen, gaps_s; None: `generate` has them."""
        ...

    async def close(self) -> None: ...


def families() -> dict[int, list[int]]:
    """The children of each process."""
    found: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        found.setdefault(parent, []).append(int(stat.parent.name))
    return found


def signal_family(pid: int | None, what: signal.Signals) -> None:
    """To a process and all below it. On Linux; elsewhere nothing happens."""
    children, left = families(), [] if pid is None else [pid]
    while left:
        one = left.pop()
        left += children.get(one, [])
        with suppress(ProcessLookupError):
            os.kill(one, what)


@contextmanager
def awake(contender: Contender) -> Iterator[None]:
    """Whoever is not measured is stopped: some look for work all the time, which takes a core's
    time from others."""
    signal_family(contender.pid, signal.SIGCONT)
    try:
        yield
    finally:
        signal_family(contender.pid, signal.SIGSTOP)


def outcome(load: Load, begun: float, samples: list[list[int]]) -> Outcome:
    """Of a load that began at `begun` (perf_counter) and has just ended."""
    wall_s = time.perf_counter() - begun
    whole = [tokens for tokens in samples if len(tokens) == load.max_tokens]
    return Outcome(wall_s, samples, load.num_sequences - len(whole))


def python_of(folder: Path, name: str) -> Path:
    """The interpreter of a peer's environment. Raises Unavailable."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        raise Unavailable("not installed (benchmarks/peers.md)")
    return python


def version_of(python: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    told = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if told.returncode:
        raise Unavailable(f"{package} is not in its environment (benchmarks/peers.md)")
    return told.stdout.strip()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def peer_environment() -> dict[str, str]:
    """What a peer's process inherits; how its threads wait is left to its own defaults."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "PYTHONPATH")}
    return {**inherited, "HF_HUB_OFFLINE": "1"}


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
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
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
        os.killpg(self._process.pid, signal.SIGCONT)  # it may be stopped, and would not hear
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def serve_lines(answer: Any) -> None:
    """The loop of a contender that is a process with JSON lines: Load in, Outcome out."""
    replies, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no reply
    for line in sys.stdin:
        told = answer(Load(**json.loads(line)))
        replies.write(json.dumps(vars(told)) + "\n")
        replies.flush()
