"""What drafting costs: so much for a round, for each step in depth, for each token.

A drafter that is a model pays one forward for each depth, whatever the number of sequences; one
that looks tokens up pays for each of them. Learned from the rounds, the older the less they count.
Milliseconds here are those of the machine at its pace at the start (`costs`): a slow minute must
not look like a deep draft.
"""

from collections.abc import Mapping

import numpy as np

MEMORY = 0.995  # of what was learned, per round
OUTLIER = 3.0  # times what was expected: a time counts at most so much
SETTLED = 8  # rounds after which outliers are known
SOLVE_EVERY = 8  # rounds, once settled: it takes as long as the rest of a round's bookkeeping
SWEEPS = 12
TINY = 1e-4  # milliseconds; below, a time is noise


class DraftCosts:
    """Milliseconds as a sum with coefficients that are not negative."""

    def __init__(self, round_ms: float = 0.0, step_ms: float = 0.0, token_ms: float = 0.0) -> None:
        self._ms = np.array([round_ms, step_ms, token_ms])
        self._squares = np.zeros((3, 3))
        self._products = np.zeros(3)
        self._num_rounds = 0

    def ms(self, tokens: float, steps: int) -> float:
        """Of asking for `tokens` in all, the longest draft having `steps`."""
        return float(self._ms @ (1.0, steps, tokens)) if steps else 0.0

    @property
    def step_ms(self) -> float:
        return float(self._ms[1])

    @property
    def token_ms(self) -> float:
        return float(self._ms[2])

    @property
    def num_rounds(self) -> int:
        """That were learned from."""
        return self._num_rounds

    def observe(self, tokens: int, steps: int, ms: float) -> None:
        """A round that asked for tokens; errors count in proportion, not in milliseconds."""
        if not steps:
            return
        if self._num_rounds >= SETTLED:
            ms = min(ms, OUTLIER * self.ms(tokens, steps) + TINY)
        ms = max(ms, TINY)
        self._num_rounds += 1
        features = np.array((1.0, steps, tokens)) / ms
        self._squares = MEMORY * self._squares + np.outer(features, features)
        self._products = MEMORY * self._products + features
        if self._num_rounds <= SETTLED or self._num_rounds % SOLVE_EVERY == 0:
            self._solve()

    def _solve(self) -> None:
        """Least squares, each coefficient in turn and none below 0, from where they were."""
        for _ in range(SWEEPS):
            for i in range(3):
                others = self._squares[i] @ self._ms - self._squares[i, i] * self._ms[i]
                self._ms[i] = max(0.0, (self._products[i] - others) / self._squares[i, i])

    def to_json(self) -> dict[str, float]:
        return dict(zip(("round_ms", "step_ms", "token_ms"), self._ms.tolist(), strict=True))

    @classmethod
    def from_json(cls, told: Mapping[str, float]) -> "DraftCosts":
        return cls(**told)
