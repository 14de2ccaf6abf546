"""Runs a command that must not outlive the process that started it.

`python -m tinkercloud.cluster.gpus.process_guard COMMAND...` with a pipe as standard input: the
command gets a session of its own; when the pipe closes (its other end died, for any reason) or the
guard gets SIGTERM or SIGINT, the whole session is ended. The kernel's parent-death signal alone
(prctl(2), PR_SET_PDEATHSIG) would not do for a Ray actor: it fires when the *thread* that forked
ends, and an actor's threads come and go. The guard has one thread only, so that the signal does
cover the guard's own death.

The command gets a folder for files of shared memory, which is removed when it has ended: what is
killed leaves its own files there for ever.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tinkercloud.config import with_shared_memory

GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2
_SHARED_MEMORY = Path("/dev/shm")


def main() -> int:
    """The command's exit status; 143 when it was ended from here."""
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: signals.append(received))
    root = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="tinkercloud-", dir=root) as folder:
        child = subprocess.Popen(
            sys.argv[1:],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_parent,
            env=with_shared_memory(Path(folder)),
        )
        try:
            while child.poll() is None and not signals and not _closed():
                pass
        finally:
            status = child.poll()
            _end(child)
    return 143 if status is None else status & 0xFF


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _closed() -> bool:
    readable, _, _ = select.select([0], [], [], _POLL_S)
    return bool(readable) and os.read(0, 1) == b""


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End what is left of the session: a server that has exited may leave workers behind."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE_S
        try:
            os.killpg(child.pid, number)
            while time.monotonic() < deadline:
                child.poll()
                os.killpg(child.pid, 0)
                time.sleep(0.05)
        except (ProcessLookupError, PermissionError):
            return


if __name__ == "__main__":
    sys.exit(main())
