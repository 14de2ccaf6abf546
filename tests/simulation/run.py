"""Runs schedules and says what was wrong with them."""

import gc
import logging
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from tests.simulation import image
from tests.simulation.coverage import Coverage
from tests.simulation.invariants import check
from tests.simulation.schedule import Schedule
from tests.simulation.world import World

_PLACE = image.scratch()
_NUMBERS = count()


@dataclass(slots=True)
class Outcome:
    """schedule: of its `places` only those that crashes came at, which gives the same run.
    failures: empty where all is well. virtual_s: how long the run was on its own clock."""

    schedule: Schedule
    failures: list[str]
    coverage: Coverage
    num_crashes: Counter[str]
    num_steps: int
    virtual_s: float
    trace: list[tuple[float, str]] = field(repr=False)

    @property
    def again(self) -> str:
        """The options with which `python -m tests.simulation` runs it once more."""
        places = (f" --at {shlex.quote(place)}" for place in sorted(self.schedule.places))
        return f"--seed {self.schedule.seed}{''.join(places)} --trace"


def run_schedule(
    schedule: Schedule, prepare: Callable[[World], Any] | None = None, *, logs: bool = False
) -> Outcome:
    """prepare: may plant something into the world before it runs. logs: the service's own are in
    the trace."""
    trace: list[tuple[float, str]] = []
    if not logs:
        logging.disable(logging.CRITICAL)
    gc.disable()  # finalisers at their own times would be one more source of chance
    try:
        place = _PLACE / str(next(_NUMBERS))
        place.mkdir()
        world = World(schedule, place, lambda now, text: trace.append((now, text)))
        if prepare is not None:
            prepare(world)
        with _logged(world) if logs else nullcontext():
            world.run(check)
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)
    loop, schedule = world.loop, replace(schedule, places=world.places_met)
    return Outcome(
        *(schedule, world.failures, world.coverage, world.num_crashes),
        *(loop.num_steps, loop.now, trace),
    )


@contextmanager
def _logged(world: World) -> Iterator[None]:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            world.note(f"  {record.levelname} {self.format(record)}")

    logger, handler = logging.getLogger("tinkercloud"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
