"""When to try what the controller does not do, to learn whether it should: by counting rounds.

A probe that fails doubles the rounds until the next, up to a limit; one that looks well is followed
by another soon. Time lost to probes is paid from a budget, a small share of all time, so that
probing can never cost more than that.
"""

from dataclasses import dataclass

MAX_SAVED_ROUNDS = 32  # whose time may be saved up to be lost


@dataclass(frozen=True, slots=True)
class ProbeSchedule:
    """every: rounds between probes. soon: after one that looked well. limit: after many failures.
    budget: the share of all time that probes may lose."""

    every: int = 100
    soon: int = 4
    limit: int = 1600
    budget: float = 0.01


class Probing:
    def __init__(self, schedule: ProbeSchedule | None = None) -> None:
        self._schedule = schedule or ProbeSchedule()
        self.interval = self._schedule.every
        self._waited = 0
        self._saved_ms = 0.0

    def due(self, loss_ms: float) -> bool:
        """A probe may lose `loss_ms`: is it time for one, and is that saved up?"""
        return self._waited >= self.interval and loss_ms <= self._saved_ms

    def advance(self, ms: float) -> None:
        """A round is over that took `ms`, of any kind."""
        self._waited += 1
        # Bounded: a quiet day must not pay for an hour of losses.
        most = max(MAX_SAVED_ROUNDS * ms, self._saved_ms)
        self._saved_ms = min(self._saved_ms + self._schedule.budget * ms, most)

    def observe(self, *, well: bool, loss_ms: float) -> None:
        """A probe is over; it lost so much, less than nothing if it gained."""
        self._saved_ms -= max(0.0, loss_ms)
        self._waited = 0
        self.interval = (
            self._schedule.soon
            if well
            else min(max(2 * self.interval, self._schedule.every), self._schedule.limit)
        )

    def rest(self) -> None:
        """Drafts were verified without a probe."""
        self._waited = 0

    def hasten(self) -> None:
        """What was learned may be wrong by now."""
        self.interval = self._schedule.soon
