"""When to try what the policy does not do, to learn whether it should: by counting rounds.

A probe that fails doubles the rounds until the next, up to a limit; one that looks well is followed
by another soon. Time lost to probes is paid from a budget, a small share of all time, so that
probing can never cost more than that.
"""

from dataclasses import dataclass

MOST_SAVED_ROUNDS = 32  # whose time may be saved up to be lost


@dataclass(frozen=True, slots=True)
class ProbeSchedule:
    """every: rounds between probes. soon: after one that looked well. limit: after many failures.
    budget: the share of all time that probes may lose."""

    every: int = 100
    soon: int = 4
    limit: int = 1600
    budget: float = 0.01


class Probing:
    def __init__(self, pace: ProbeSchedule | None = None) -> None:
        self._pace = pace or ProbeSchedule()
        self.interval = self._pace.every
        self._waited = 0
        self._saved_ms = 0.0

    def due(self, loss_ms: float) -> bool:
        """A probe may lose `loss_ms`: is its time come, and is that saved up?"""
        return self._waited >= self.interval and loss_ms <= self._saved_ms

    def passed(self, ms: float) -> None:
        """A round is over that took `ms`; called for every round."""
        self._waited += 1
        # Not without end: after a quiet day there is no licence for an hour of losses.
        most = max(MOST_SAVED_ROUNDS * ms, self._saved_ms)
        self._saved_ms = min(self._saved_ms + self._pace.budget * ms, most)

    def told(self, *, well: bool, loss_ms: float) -> None:
        """A probe is over; it lost so much, less than nothing if it gained."""
        self._saved_ms -= max(0.0, loss_ms)
        self._waited = 0
        self.interval = (
            self._pace.soon
            if well
            else min(max(2 * self.interval, self._pace.every), self._pace.limit)
        )

    def hurry(self) -> None:
        """What was learned may be wrong by now."""
        self.interval = self._pace.soon
