"""How many rows of prompts a step computes.

Rows are cheap on one machine and dear on the next, so the budget is a time. What a row of a prompt
adds is learned from the steps themselves; every so often a step goes without prompts, so that what
it takes alone is known under the load of the moment.
"""

LEAST_SHARE, SHARE = 1.0, 0.5
"""Of a step's time without prompts: for the user who was given least, and for the others."""
PLAIN_EVERY = 16
"""Steps of which one goes without prompts, where users share them."""
STEP_MS, SHORT_STEP_MS = 200.0, 40.0
"""Of a step with prompts alone, about: who comes meanwhile waits for its end. The short one is for
where somebody else was there a moment ago, and may come back."""
MOMENT_MS = 2000.0
MIN_ROWS, MIN_ALONE_ROWS, MIN_SHORT_ROWS = 4, 64, 16
MEMORY = 0.8  # of an average, from one step to the next


class PrefillBudget:
    """max_rows: of a step, whoever waits."""

    def __init__(self, max_rows: int):
        self._max_rows = max_rows
        self._plain_ms: dict[int, float] = {}  # a step's without prompts, by its samples' magnitude
        self._prompt_ms = self._prompt_rows = 0.0  # what rows of prompts added, and how many
        self._since_plain = 0
        self._alone_ms = MOMENT_MS  # of steps since users shared one

    def shared(self) -> None:
        """The next step is one of several users."""
        self._alone_ms = 0.0

    def alone(self) -> int:
        """For a user whom nobody waits for."""
        if self._alone_ms < MOMENT_MS:
            return self._rows_within(SHORT_STEP_MS, MIN_SHORT_ROWS)
        return self._rows_within(STEP_MS, MIN_ALONE_ROWS)

    def beside(self, num_samples: int, *, is_least: bool) -> int:
        """In a step in which so many samples get a token. is_least: for the user who was given
        least. 0: the step is to go without prompts."""
        if is_least and not num_samples:
            return self.alone()
        plain_ms = self._plain_ms.get(max(num_samples, 1).bit_length())
        if num_samples and (plain_ms is None or self._since_plain >= PLAIN_EVERY):
            return 0
        if plain_ms is None or not self._prompt_rows:
            return MIN_ROWS
        return self._rows_within((LEAST_SHARE if is_least else SHARE) * plain_ms, MIN_ROWS)

    def took(self, ms: float, num_prompt_rows: int, num_samples: int) -> None:
        """A step is over."""
        self._alone_ms += ms
        magnitude = num_samples.bit_length()
        if num_prompt_rows:
            self._since_plain += 1
            plain_ms = self._plain_ms.get(max(magnitude, 1), 0.0)
            self._prompt_ms = MEMORY * self._prompt_ms + max(ms - plain_ms, 0.0)
            self._prompt_rows = MEMORY * self._prompt_rows + num_prompt_rows
        elif num_samples:
            self._since_plain = 0
            before = self._plain_ms.get(magnitude, ms)
            self._plain_ms[magnitude] = MEMORY * before + (1 - MEMORY) * ms

    def _rows_within(self, ms: float, least: int) -> int:
        if not self._prompt_ms:
            return self._max_rows
        rows = int(ms * self._prompt_rows / self._prompt_ms)
        return min(max(rows, least), self._max_rows)
