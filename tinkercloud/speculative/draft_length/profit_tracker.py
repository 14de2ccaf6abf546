"""What speculation brought in the end: the time of its rounds against that of plain ones.

Whatever an expectation leaves out shows here. Where speculation is behind, it is barred for some
rounds, for twice as many at the next time, so that being wrong again and again costs little.
"""

from dataclasses import dataclass
from math import sqrt

LEAST_ROUNDS = 8
MEMORY = 0.99
DOUBT = 0.6
"""Relative deviation of one round's profit; of the mean of n rounds, less by their root."""
FIRST_BAR, LONGEST_BAR = 32, 2048  # rounds; a sample has some hundred


@dataclass(slots=True)
class ProfitTracker:
    worth_ms: float = 0.0
    spent_ms: float = 0.0
    num_rounds: int = 0
    barred_rounds: int = 0  # still to come
    next_bar: int = FIRST_BAR

    @property
    def is_barred(self) -> bool:
        return self.barred_rounds > 0

    def add(self, worth_ms: float, spent_ms: float) -> None:
        """A speculative round took `spent_ms`; plain ones take `worth_ms` for as many tokens."""
        self.worth_ms = MEMORY * self.worth_ms + worth_ms
        self.spent_ms = MEMORY * self.spent_ms + spent_ms
        self.num_rounds += 1
        rounds = min(self.num_rounds, 1 / (1 - MEMORY))
        behind = self.worth_ms < (1 - DOUBT / sqrt(rounds)) * self.spent_ms
        if self.num_rounds >= LEAST_ROUNDS and behind:
            self.barred_rounds = self.next_bar
            self.next_bar = min(2 * self.next_bar, LONGEST_BAR)
            self._clear()

    def advance(self) -> None:
        """A round is over, of any kind."""
        self.barred_rounds = max(0, self.barred_rounds - 1)

    def observe_probe(self, *, well: bool) -> None:
        """Each probe that looks well halves what is left of the bar."""
        if well:
            self.barred_rounds //= 2

    def reset(self) -> None:
        self.barred_rounds, self.next_bar = 0, FIRST_BAR
        self._clear()

    def _clear(self) -> None:
        self.worth_ms = self.spent_ms = 0.0
        self.num_rounds = 0
