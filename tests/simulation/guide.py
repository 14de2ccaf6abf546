"""Crashes where none came yet: chance alone comes back to what it has met, and seldom meets the
rest."""

from dataclasses import dataclass, replace

from tests.simulation.coverage import Coverage, all_awaits, beyond, flush_beyond, name_of
from tests.simulation.flushes import all_flushes
from tests.simulation.schedule import Schedule, generate

EVERY = 4
"""Schedules; those between are of chance alone, as crashes that come often and close together are
other runs than one crash is."""


@dataclass(frozen=True, slots=True)
class Guide:
    """coverage: of the schedules that have run; whoever runs them adds to it. every: so many
    schedules have one that ends the service at places where no crash has come; None: none has."""

    coverage: Coverage
    every: int | None = EVERY

    def schedule(self, seed: int) -> Schedule:
        schedule = generate(seed)
        if self.every is None or seed % self.every != self.every - 1:
            return schedule
        return replace(schedule, places=frozenset(map(name_of, uncrashed(self.coverage))))


def uncrashed(coverage: Coverage) -> list[str]:
    """Awaits and flushes, but those that are beyond the simulation."""
    places = [place for place in all_awaits() if place not in beyond()]
    places += [place for place in all_flushes() if flush_beyond(place) is None]
    return [place for place in places if not coverage.crashed[place]]
