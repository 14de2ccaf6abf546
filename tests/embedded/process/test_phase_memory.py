"""The engine's memory at its highest, by what it did."""

import subprocess
import sys

from tinkercloud.embedded.process.phase_memory import INTERVAL_S, PhaseMemory


def test_each_phase_keeps_its_own_highest() -> None:
    sizes, now_s = iter((5, 9, 3, 7)), iter(INTERVAL_S * step for step in range(10))
    memory = PhaseMemory(lambda: next(sizes), lambda: next(now_s))
    for phase in ("sampling", "training", "training"):
        memory.worked(phase)
    assert memory.stats() == {
        "engine_memory_bytes": 7,
        "sampling_memory_bytes": 5,
        "training_memory_bytes": 9,
    }


def test_steps_that_follow_each_other_at_once_are_looked_at_once() -> None:
    sizes = iter((5, 6))
    memory = PhaseMemory(lambda: next(sizes), lambda: 1.0)
    memory.worked("sampling")
    memory.worked("sampling")
    assert memory.stats()["sampling_memory_bytes"] == 5


def test_a_phase_that_has_not_been_has_no_number() -> None:
    assert set(PhaseMemory().stats()) == {"engine_memory_bytes"}


def test_resident_memory_is_that_of_this_process() -> None:
    # In a process of its own: what other tests left behind may be freed between the two.
    program = """
from tinkercloud.embedded.process.phase_memory import resident_bytes
before = resident_bytes()
kept = bytearray(64 << 20)
kept[::4096] = b"x" * len(kept[::4096])
print(resident_bytes() - before)
"""
    run = subprocess.run((sys.executable, "-c", program), capture_output=True, check=True)
    assert 48 << 20 < int(run.stdout) < 80 << 20
