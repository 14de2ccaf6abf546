"""When crashes come: one after the other at counted events, or at awaits."""

import random
from collections import Counter
from dataclasses import dataclass

from tests.simulation.coverage import name_of
from tests.simulation.schedule import MAX_AT_AWAITS, Crash, Schedule

GAPS_S = (0.0, 1.0, 4.0)
"""Of virtual time; without one, all of a schedule would come in its first second."""


@dataclass(eq=False)
class CrashPlan:
    """Crashes, one after the other. count: events of the next one since the last one. is_after: the
    next one's `after` has come."""

    crashes: list[Crash]
    count: int = 0
    is_after: bool = False

    @property
    def trigger(self) -> str | None:
        """What the next crash waits for."""
        return self.crashes[0].trigger if self.crashes else None

    def next_at(self, trigger: str, label: str, *, is_up: bool) -> Crash | None:
        """The crash that comes at this event."""
        if self.trigger != trigger:
            return None
        crash = self.crashes[0]
        if crash.after and not self.is_after:
            self.is_after = label.startswith(crash.after)
            return None
        self.count += label.startswith(crash.at)
        if self.count < crash.count:
            return None
        if not is_up and crash.kind == "stop":
            return None
        self.count = 0
        self.is_after = False
        return self.crashes.pop(0)


def plans_of(schedule: Schedule) -> list[CrashPlan]:
    """Those at awaits come each by itself."""
    alone = ([crash] for crash in schedule.at_awaits)
    return [CrashPlan(list(each)) for each in (schedule.crashes, schedule.aimed, *alone)]


class AwaitCrashes:
    """Those of a schedule's `await_rate` and `places`: each comes at the await or the flush that it
    is for, once, those of `places` some time apart. met: those of `places` that came."""

    def __init__(self, schedule: Schedule):
        self._schedule = schedule
        self._left = MAX_AT_AWAITS if schedule.await_rate or schedule.places else 0
        self._crashes: dict[str, Crash | None] = {}
        self._counts = Counter[str]()
        self.met: set[str] = set()
        self._gap_s = random.Random(f"{schedule.seed} gap").choice(GAPS_S)
        self._not_before_s = 0.0

    @property
    def come(self) -> bool:
        return self._left > 0

    def at(self, place: str, now_s: float) -> Crash | None:
        """The one that comes now, as a task waits at that place, or something is flushed there."""
        if place not in self._crashes:
            self._crashes[place] = self._schedule.crash_at(name_of(place))
        crash = self._crashes[place]
        if crash is None or not self._left:
            return None
        is_guided = crash.at in self._schedule.places
        if is_guided and now_s < self._not_before_s:
            return None
        self._counts[place] += 1
        if self._counts[place] < crash.count:
            return None
        if is_guided:
            self.met.add(crash.at)
            self._not_before_s = now_s + self._gap_s
        self._crashes[place] = None
        self._left -= 1
        return crash
