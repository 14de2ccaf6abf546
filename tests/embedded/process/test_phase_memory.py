"""The engine's memory at its highest, by what it did."""

from tinkercloud.embedded.process.phase_memory import INTERVAL_S, PhaseMemory, resident_bytes


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
    before = resident_bytes()
    kept = bytearray(64 << 20)
    kept[::4096] = b"x" * len(kept[::4096])
    assert resident_bytes() - before > 48 << 20
