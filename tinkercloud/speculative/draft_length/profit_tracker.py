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
BAR_OF_SEQUENCE, MOST_SEQUENCES, LONGEST_BAR = 32, 8, 2048
"""Rounds of the first bar, by sequences: one text may begin to repeat itself soon, within the some
hundred tokens of a sample; of many the mean stays, and each trial costs more."""


@dataclass(slots=True)
class ProfitTracker:
    worth_ms: float = 0.0
    spent_ms: float = 0.0
    num_rounds: int = 0
    barred_rounds: int = 0  # still to come
    next_bar: int = 0  # at least

    @property
    def is_barred(self) -> bool:
        return self.barred_rounds > 0

    def add(self, worth_ms: float, spent_ms: float, num_sequences: int) -> None:
        """A speculative round took `spent_ms`; plain ones take `worth_ms` for as many tokens."""
        self.worth_ms = MEMORY * self.worth_ms + worth_ms
        self.spent_ms = MEMORY * self.spent_ms + spent_ms
        self.num_rounds += 1
        rounds = min(self.num_rounds, 1 / (1 - MEMORY))
        behind = self.worth_ms < (1 - DOUBT / sqrt(rounds)) * self.spent_ms
        if self.num_rounds >= LEAST_ROUNDS and behind:
            first_bar = BAR_OF_SEQUENCE * min(num_sequences, MOST_SEQUENCES)
            self.barred_rounds = max(self.next_bar, first_bar)
            self.next_bar = min(2 * self.barred_rounds, LONGEST_BAR)
            self._clear()

    def advance(self) -> None:
        """A round is over, of any kind."""
        self.barred_rounds = max(0, self.barred_rounds - 1)

    def observe_probe(self, *, well: bool) -> None:
        """Each probe that looks well halves what is left of the bar."""
        if well:
            self.barred_rounds //= 2

    def reset(self) -> None:
        self.barred_rounds, self.next_bar = 0, 0
        self._clear()

    def _clear(self) -> None:
        self.worth_ms = self.spent_ms = 0.0
        self.num_rounds = 0
