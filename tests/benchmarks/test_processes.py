"""How a benchmark keeps contenders apart."""

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.lib.processes import awake, families, signal_family

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")


@pytest.fixture
def family() -> Iterator[list[int]]:
    """A process and its child, which sleep."""
    process = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
    try:
        while not (children := families().get(process.pid, [])):
            time.sleep(0.01)
        yield [process.pid, *children]
    finally:
        signal_family(process.pid, signal.SIGKILL)
        process.wait()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def become(pids: list[int], *, stopped: bool) -> bool:
    """Whether all of them are so within a second: signals take their time."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        if all(is_stopped(pid) == stopped for pid in pids):
            return True
        time.sleep(0.01)
    return False


def test_a_contender_is_awake_with_all_its_processes_only_while_it_is_measured(
    family: list[int],
) -> None:
    contender = SimpleNamespace(pid=family[0])
    signal_family(contender.pid, signal.SIGSTOP)
    assert become(family, stopped=True)
    with awake(contender):  # type: ignore[arg-type]
        assert become(family, stopped=False)
    assert become(family, stopped=True)


def test_a_contender_that_fails_is_stopped_too(family: list[int]) -> None:
    with pytest.raises(ValueError, match="failed"), awake(SimpleNamespace(pid=family[0])):  # type: ignore[arg-type]
        raise ValueError("failed")
    assert become(family, stopped=True)


def test_where_no_process_runs_nobody_is_signalled() -> None:
    signal_family(None, signal.SIGKILL)
