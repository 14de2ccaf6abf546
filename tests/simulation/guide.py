"""Crashes where none came yet: chance alone comes back to what it has met, and seldom meets the
rest."""

from dataclasses import dataclass, field, replace

from tests.simulation.coverage import Coverage, all_awaits, beyond, flush_beyond, name_of
from tests.simulation.drawing import generate
from tests.simulation.flushes import all_flushes
from tests.simulation.run import Outcome, run_schedule

EVERY = 4
"""Schedules; those between are of chance alone, as crashes that come often and close together are
other runs than one crash is."""


@dataclass(frozen=True, slots=True)
class Guide:
    """coverage: of the schedules that have run. every: so many schedules have one that ends the
    service at places where no crash has come; None: none has. places: where the others end it."""

    coverage: Coverage = field(default_factory=Coverage)
    every: int | None = EVERY
    places: frozenset[str] = frozenset()

    def run(self, seed: int, *, logs: bool = False) -> Outcome:
        is_guided = self.every is not None and seed % self.every == self.every - 1
        places = map(name_of, uncrashed(self.coverage)) if is_guided else self.places
        outcome = run_schedule(replace(generate(seed), places=frozenset(places)), logs=logs)
        self.coverage.add(outcome.coverage)
        return outcome


def uncrashed(coverage: Coverage) -> list[str]:
    """Awaits and flushes, but those that are beyond the simulation."""
    places = [place for place in all_awaits() if place not in beyond()]
    places += [place for place in all_flushes() if flush_beyond(place) is None]
    return [place for place in places if not coverage.crashed[place]]
