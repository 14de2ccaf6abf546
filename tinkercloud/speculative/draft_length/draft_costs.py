"""What drafting costs: so much for a round, for each step in depth, for each token.

A drafter that is a model pays one forward for each depth, whatever the number of sequences; one
that looks tokens up pays for each of them. Learned from the rounds, the older the less they count.
Milliseconds here are those of the machine as it was at the start (`costs`): a slow minute must not
look like a deep draft.
"""

MEMORY = 0.995  # of what was learned, per round
OUTLIER = 3.0  # times what was expected: a time counts at most so much
SETTLED = 8  # rounds after which outliers are known
# After these rounds, then every so many: it takes as long as the rest of what a round teaches.
FIRST_SOLVED, SOLVE_EVERY = (1, 2, 3, 4, 6), 8
SWEEPS = 12
TINY = 1e-4  # milliseconds; below, a time is noise


class DraftCosts:
    """Milliseconds as a sum with coefficients (round, step, token) that are not negative."""

    def __init__(self, round_ms: float = 0.0, step_ms: float = 0.0, token_ms: float = 0.0) -> None:
        self.forget()
        self.coefficients = [round_ms, step_ms, token_ms]

    def ms(self, tokens: float, steps: int) -> float:
        """Of asking for `tokens` in all, the longest draft having `steps`."""
        round_ms, step_ms, token_ms = self.coefficients
        return round_ms + step_ms * steps + token_ms * tokens if steps else 0.0

    @property
    def token_ms(self) -> float:
        return self.coefficients[2]

    def observe(self, tokens: int, steps: int, ms: float) -> None:
        """A round that asked for tokens; errors count in proportion, not in milliseconds."""
        if not steps:
            return
        if self.num_rounds >= SETTLED:
            ms = min(ms, OUTLIER * self.ms(tokens, steps) + TINY)
        ms = max(ms, TINY)
        self.num_rounds += 1
        features = 1.0 / ms, steps / ms, tokens / ms
        for i, feature in enumerate(features):
            row = self._squares[i]
            row[:] = [MEMORY * s + feature * f for s, f in zip(row, features, strict=True)]
            self._products[i] = MEMORY * self._products[i] + feature
        if self.num_rounds in FIRST_SOLVED or self.num_rounds % SOLVE_EVERY == 0:
            self._solve()

    def forget(self) -> None:
        """As nothing was learned: times of a slow minute, or of a network that had to be read from
        memory, would be corrected by no round where they keep drafts from being asked for."""
        self.coefficients = [0.0] * 3
        self._products = [0.0] * 3
        self._squares = [[0.0] * 3 for _ in range(3)]
        self.num_rounds = 0  # that were learned from

    def _solve(self) -> None:
        """Least squares by coordinate descent, no coefficient below 0, from where they were."""
        solution = self.coefficients
        for _ in range(SWEEPS):
            for i, row in enumerate(self._squares):
                found = sum(s * x for s, x in zip(row, solution, strict=True))
                solution[i] = max(0.0, solution[i] + (self._products[i] - found) / row[i])
