"""Run one function on several ranks, each a process of its own."""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.serving import ROOT

LIMIT_S = 240.0


def run(
    function: Callable[..., Any], world_size: int, *args: Any, limit_s: float = LIMIT_S
) -> list[Any]:
    """`function(rank, world_size, init_method, *args)` on every rank; the results by rank.

    The function must be importable by name. A rank that raises ends the others, and its traceback
    is in the AssertionError.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        init_method = (folder / "rendezvous").as_uri()
        work = (function.__module__, function.__qualname__, world_size, init_method, args)
        (folder / "work").write_bytes(pickle.dumps(work))
        ranks = [_start(folder, rank) for rank in range(world_size)]
        try:
            _wait(ranks, folder, time.monotonic() + limit_s)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                rank.wait()
        return [pickle.loads((folder / f"result{r}").read_bytes()) for r in range(world_size)]


def _start(folder: Path, rank: int) -> "subprocess.Popen[bytes]":
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONWARNINGS": "ignore",
    }
    with (folder / f"log{rank}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.cpu.spawn", str(folder), str(rank)],
            cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def _wait(ranks: "list[subprocess.Popen[bytes]]", folder: Path, deadline: float) -> None:
    while any(rank.poll() is None for rank in ranks):
        failed = [i for i, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
        assert not failed, _logs(folder, failed[:1])
        assert time.monotonic() < deadline, "too slow\n" + _logs(folder, range(len(ranks)))
        time.sleep(0.02)
    failed = [i for i, rank in enumerate(ranks) if rank.returncode]
    assert not failed, _logs(folder, failed[:1])


def _logs(folder: Path, ranks: Any) -> str:
    return "\n".join(f"rank {r}:\n{(folder / f'log{r}').read_text()[-6000:]}" for r in ranks)


def _main() -> None:
    import importlib

    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    module, name, world_size, init_method, args = pickle.loads((folder / "work").read_bytes())
    function = getattr(importlib.import_module(module), name)
    result = function(rank, world_size, init_method, *args)
    (folder / f"result{rank}").write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    # Without the interpreter's end: in some of a thousand, destructors of gloo abort there while
    # other ranks still compute ("terminate called without an active exception").
    os._exit(0)


if __name__ == "__main__":
    _main()
