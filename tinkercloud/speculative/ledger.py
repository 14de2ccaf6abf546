"""What speculation brought, in the end: the time that rounds took against what plain ones would have.

Whatever an expectation leaves out shows here. Where speculation is behind it is barred for some
rounds, for twice as many at the next time, so that being wrong again and again costs little.
"""

from dataclasses import dataclass

LEAST_ROUNDS = 32
MEMORY = 0.99
BEHIND = 0.96
FIRST_BAR, LONGEST_BAR = 256, 8192


@dataclass(slots=True)
class Ledger:
    worth_ms: float = 0.0
    spent_ms: float = 0.0
    num_rounds: int = 0
    barred_rounds: int = 0  # still to come
    next_bar: int = FIRST_BAR

    @property
    def bars(self) -> bool:
        return self.barred_rounds > 0

    def add(self, worth_ms: float, spent_ms: float) -> None:
        """A speculative round took `spent_ms`; plain ones take `worth_ms` for as many tokens."""
        self.worth_ms = MEMORY * self.worth_ms + worth_ms
        self.spent_ms = MEMORY * self.spent_ms + spent_ms
        self.num_rounds += 1
        if self.num_rounds >= LEAST_ROUNDS and self.worth_ms < BEHIND * self.spent_ms:
            self.barred_rounds = self.next_bar
            self.next_bar = min(2 * self.next_bar, LONGEST_BAR)
            self._clear()

    def passed(self) -> None:
        """A round is over, of any kind."""
        self.barred_rounds = max(0, self.barred_rounds - 1)

    def forgive(self) -> None:
        self.barred_rounds, self.next_bar = 0, FIRST_BAR
        self._clear()

    def _clear(self) -> None:
        self.worth_ms = self.spent_ms = 0.0
        self.num_rounds = 0
