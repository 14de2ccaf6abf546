"""A failing schedule, made smaller: crashes, faults and steps are left out while it still fails."""

from collections.abc import Iterator
from dataclasses import replace

from tests.simulation.run import run_schedule
from tests.simulation.schedule import Schedule


def shrunk(schedule: Schedule) -> Schedule:
    """None of what is left can be left out alone, or all that it has."""
    smaller: Schedule | None = schedule
    while smaller is not None:
        schedule = smaller
        smaller = next((each for each in _smaller(schedule) if run_schedule(each).failures), None)
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Large pieces first."""
    yield from _calmer(schedule)
    for number, program in enumerate(schedule.programs):
        for length in (len(program) // 2, len(program) // 4, 1):
            for start in range(0, len(program), max(length, 1)):
                shorter = program[:start] + program[start + max(length, 1) :]
                if len(shorter) < len(program):
                    programs = (
                        *schedule.programs[:number],
                        shorter,
                        *schedule.programs[number + 1 :],
                    )
                    yield replace(schedule, programs=programs)


def _calmer(schedule: Schedule) -> Iterator[Schedule]:
    """With the same programs."""
    for name in ("network_rate", "engine_rate", "await_rate"):
        if getattr(schedule, name):
            yield replace(schedule, **{name: 0.0})
    for place in schedule.places:
        yield replace(schedule, places=schedule.places - {place})
    if schedule.outage is not None:
        yield replace(schedule, outage=None)
    if schedule.await_rate > 0.001:
        yield replace(schedule, await_rate=schedule.await_rate / 2)  # some of the same ones
    for field in ("disk", "crashes", "aimed", "at_awaits", "commands"):
        faults = getattr(schedule, field)
        for index in range(len(faults)):
            yield replace(schedule, **{field: faults[:index] + faults[index + 1 :]})
