"""How a benchmark keeps contenders apart."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.lib.processes import awake, families, signal_family
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")


@pytest.fixture
def family() -> Iterator[list[int]]:
    """A process and its child, which sleep."""
    process = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
    try:
        children = wait_for("it has a child", lambda: families().get(process.pid, []))
        yield [process.pid, *children]
    finally:
        signal_family(process.pid, signal.SIGKILL)
        process.wait()


def state(pid: int) -> str:
    """A letter; "T" where it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until(pids: list[int], *, stopped: bool) -> None:
    """Signals take their time."""
    wait_for(
        "all are stopped" if stopped else "none is stopped",
        lambda: [state(pid) for pid in pids],
        lambda states: all((state == "T") == stopped for state in states),
    )


def test_a_contender_is_awake_with_all_its_processes_only_while_it_is_measured(
    family: list[int],
) -> None:
    contender = SimpleNamespace(pid=family[0])
    signal_family(contender.pid, signal.SIGSTOP)
    wait_until(family, stopped=True)
    with awake(contender):  # type: ignore[arg-type]
        wait_until(family, stopped=False)
    wait_until(family, stopped=True)


def test_a_contender_that_fails_is_stopped_too(family: list[int]) -> None:
    with pytest.raises(ValueError, match="failed"), awake(SimpleNamespace(pid=family[0])):  # type: ignore[arg-type]
        raise ValueError("failed")
    wait_until(family, stopped=True)


def test_where_no_process_runs_nobody_is_signalled() -> None:
    signal_family(None, signal.SIGKILL)
