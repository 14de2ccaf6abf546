"""Ends what pools left behind when the tests that started them were killed.

A pool goes on when its command has ended, so no parent's death ends it. This process waits for
that of the tests: its standard input, a line for each pool's file, closes then.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.serving import ROOT


@cache
def _guard() -> "subprocess.Popen[bytes]":
    """One for these tests. In a session of its own: a signal to their group does not reach it."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.pool.pool_guard"],
        cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def guard(pool_file: Path) -> None:
    """Before the first command on this pool."""
    stdin = _guard().stdin
    assert stdin is not None
    stdin.write(f"{pool_file}\n".encode())
    stdin.flush()


def processes_of(pool_files: set[str]) -> list[int]:
    """Commands and supervisors on these pools: what they start ends with them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if "pool" in words and pool_files & set(words):
                found.append(int(entry.name))
    return found


def main() -> None:
    pool_files = set(sys.stdin.read().splitlines())
    while left := processes_of(pool_files):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
