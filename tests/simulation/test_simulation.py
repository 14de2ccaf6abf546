"""The service keeps its promises whatever ends, is lost, or comes twice."""

import re
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.simulation import world
from tests.simulation.beyond import BEYOND, FLUSHES_BEYOND
from tests.simulation.coverage import ROOMS, ROOT, beyond, name_of, named, places_on_disk
from tests.simulation.drawing import generate
from tests.simulation.flushes import all_flushes
from tests.simulation.guide import Guide, uncrashed
from tests.simulation.run import run_schedule
from tests.simulation.schedule import MAX_AT_AWAITS
from tinkercloud.services.recovery.returns import CannotComeBack, Return

FAST_S, SLOW_S = 15.0, 1200.0
NUM_PARTS = 4
"""Of the slow schedules: one test may not take as long as pytest's `faulthandler_timeout`."""
NUM_FAST = 60
FIRST_SLOW_SEED = 1_000_000


def run_for(seconds: float, first: int, num: int) -> None:
    deadline, seed, guide = time.monotonic() + seconds, first, Guide()
    while time.monotonic() < deadline and seed - first < num:
        outcome = guide.run(seed)
        again = f"python -m tests.simulation {outcome.again}"
        assert not outcome.failures, f"{again}\n" + "\n".join(outcome.failures[:5])
        seed += 1


def test_schedules_end_as_if_nothing_had_happened() -> None:
    run_for(FAST_S, 0, NUM_FAST)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_many_schedules_end_as_if_nothing_had_happened(part: int) -> None:
    run_for(SLOW_S / NUM_PARTS, FIRST_SLOW_SEED * (1 + part), FIRST_SLOW_SEED)


def test_returns_that_are_given_up_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models, where half of what the engine is asked for ends it or takes long."""
    given_up: list[str] = []
    plain = Return.engine_ended

    def engine_ended(self: Return) -> None:
        try:
            plain(self)
        except CannotComeBack:
            given_up.append(self.model_id)
            raise

    monkeypatch.setattr(Return, "engine_ended", engine_ended)
    for seed in range(7, 40):
        outcome = run_schedule(replace(generate(seed), engine_rate=0.5))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[:5]}"
        if given_up:
            return
    pytest.fail("none is given up")


def test_a_seed_gives_the_same_run_again() -> None:
    first, second = (run_schedule(generate(7)) for _ in range(2))
    assert first.trace == second.trace
    assert first.num_steps == second.num_steps


def test_a_guided_schedule_ends_the_service_where_none_has() -> None:
    """And what it met gives the same run again, whatever else was looked for."""
    guide = Guide(every=1)
    num_left, outcomes = [len(uncrashed(guide.coverage))], []
    for seed in range(3):
        outcomes.append(guide.run(seed))
        assert not outcomes[-1].failures
        num_left.append(len(uncrashed(guide.coverage)))
    assert all(before - after >= MAX_AT_AWAITS // 2 for before, after in pairwise(num_left))
    last = outcomes[-1]
    assert 0 < len(last.schedule.places) <= MAX_AT_AWAITS
    again = run_schedule(last.schedule)
    assert again.trace == last.trace
    assert "--at" in again.again


def test_what_is_beyond_the_simulation_is_there() -> None:
    """Each row of the tables is of an await or a flush that the service has."""
    assert set(beyond().values()) == set(BEYOND.values())
    for (file, _), why in BEYOND.items():
        places = [place for place, reason in beyond().items() if reason == why]
        assert any(place.startswith(f"tinkercloud/{file}") for place in places)
    for part in FLUSHES_BEYOND:
        assert any(part in place for place in all_flushes())


def test_what_a_run_flushes_is_on_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """But what SQLite does with its log beyond commits, as it opens or moves it into the file."""
    met: set[str] = set()

    def noted(label: str, name: str, changes: Iterable[str]) -> list[str]:
        places = places_on_disk(label, name, changes)
        met.update(place for place in places if "fsync" in place)
        return places

    monkeypatch.setattr(world, "places_on_disk", noted)
    for schedule in filter(lambda each: each.await_rate, map(generate, range(6))):
        assert not run_schedule(schedule).failures
    others = met - set(all_flushes())
    assert all(" of tinkercloud.db" in place for place in others)
    assert len(met - others) > 40


def test_a_place_is_named_by_its_function(tmp_path: Path) -> None:
    """A seed's crashes come where they came before lines above were changed."""
    text = (
        "class A:\n    async def one(self):\n        await first()\n        flushing.flush(file)\n"
        "    async def other(self):\n        await (\n            second()\n        )\n"
    )
    plain, changed = tmp_path / "plain.py", tmp_path / "changed.py"
    plain.write_text(text)
    changed.write_text(f"import x\n\n{text}")
    names = ["A.one 1", "A.one 2", "A.other 1"]
    assert [named(plain, line) for line in (3, 4, 6)] == names
    assert [named(changed, line) for line in (5, 6, 8)] == names
    file = "fsync at tinkercloud/services/checkpoints/checkpoint_files.py"
    assert name_of(f"{file}:1").startswith(f"{file}, ")
    assert name_of("fsync of a commit: INSERT futures") == "fsync of a commit: INSERT futures"


def test_no_default_holds_the_clock_of_the_machine() -> None:
    """It would be bound before a run replaces it."""
    rooms = (path for room in ROOMS for path in (ROOT / "tinkercloud" / room).rglob("*.py"))
    held = re.compile(r"default_factory=time\.")
    assert not [path for path in rooms if held.search(path.read_text(encoding="utf-8"))]


def test_a_schedule_has_thirty_operations_of_two_users_and_a_crash() -> None:
    for seed in range(50):
        schedule = generate(seed)
        assert schedule.num_operations >= 30
        assert len(schedule.programs) == 2
        assert schedule.crashes
