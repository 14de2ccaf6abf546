"""Pools in tests: their files, with real or fake programs, and commands on them."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.pool.pool_guard import guard
from tests.ports import reserved_port, reserved_ports
from tests.serving import QUIET, ROOT
from tests.waiting import wait_for
from tinkercloud.pool.pool_state import PoolFolder, PoolState

LIMIT_S = 180.0


@dataclass(frozen=True)
class Pool:
    """A pool's file and data folder."""

    file: Path
    data_dir: Path

    @property
    def folder(self) -> PoolFolder:
        return PoolFolder(self.data_dir, self.file)

    @property
    def state(self) -> PoolState:
        state = self.folder.read()
        assert state is not None
        return state

    def command(self, name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        places = ("--file", str(self.file), "--data-dir", str(self.data_dir))
        return subprocess.run(
            [sys.executable, "-m", "tinkercloud", "pool", name, *arguments, *places],
            cwd=ROOT, env=os.environ | QUIET, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip

    def await_state(self, is_meant: Callable[[PoolState], bool]) -> PoolState:
        def read() -> tuple[PoolState, str]:
            return self.state, self.folder.log.read_text()

        state, _ = wait_for(
            "the pool is in the state", read, lambda seen: is_meant(seen[0]), limit_s=LIMIT_S
        )
        return state

    def worker_pid(self, name: str, program: str) -> int:
        """Of the process of a worker's that runs this program. On a busy machine a worker may have
        been taken for dead, and is just being started again."""
        found = wait_for(f"{program} of {name} runs", lambda: self._worker_pid(name, program))
        assert found is not None
        return found

    def _worker_pid(self, name: str, program: str) -> int | None:
        port = next(w["port"] for w in self._workers() if w["name"] == name)
        wanted = {"worker": f"127.0.0.1:{port}", "rpc": str(port + 1)}[program]
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if wanted in words and (program == "rpc") == ("-p" in words):
                return int(entry.name)
        return None

    def _workers(self) -> list[dict[str, Any]]:
        return yaml.safe_load(self.file.read_text())["workers"]


def fake_programs(folder: Path) -> dict[str, str]:
    """Paths of llama-server and of the RPC server."""
    paths = {}
    for name in ("server", "rpc"):
        path = folder / f"fake-{name}"
        path.write_text(
            f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/pool/fake_llama.py {name} "$@"\n'
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        paths[name] = str(path)
    return paths


def write_pool(
    folder: Path, models: list[dict[str, Any]], workers: list[dict[str, Any]], **coordinator: Any
) -> Pool:
    values = {
        "coordinator": {"port": reserved_port(), **coordinator},
        "workers": [{"start": "local", "port": reserved_ports(3), **worker} for worker in workers],
        "models": models,
    }
    path = folder / "pool.yaml"
    path.write_text(json.dumps(values))  # which is YAML
    guard(path)
    return Pool(path, folder / "data")


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
