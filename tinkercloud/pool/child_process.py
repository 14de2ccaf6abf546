"""Programs that end with the process that started them, each with a log file of its own."""

import ctypes
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


class ChildProcess:
    """To be made by the main thread: Linux takes the end of the thread that forked for the
    parent's. has_stdin: with a pipe that closes when this process ends."""

    def __init__(self, command: Sequence[str | Path], log: Path, *, has_stdin: bool = False):
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if has_stdin else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the terminal is for us, who end it in order
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self.status is None:
            self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def log_end(self, num_lines: int = 8) -> str:
        return log_end(self.log, num_lines)


def log_end(log: Path, num_lines: int) -> str:
    """The last lines of a file; "" where there is none."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 400 * num_lines))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    return "\n".join(lines[-num_lines:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
