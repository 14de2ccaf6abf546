"""How many rows of prompts a step computes.

Rows are cheap on one machine and dear on the next, so the budget is a time. What a row of a prompt
adds is learned from the steps themselves; every so often a step goes without prompts, so that what
it takes alone is known under the load of the moment. A row behind a long context is dearer, by the
positions that it reads, so what is counted is work: 1 for a row without a context.

Beside samples the time is lent: what prompts took too much in one step is held back in the next
ones. So on average they add no more than their share, however far off the guess of a step is and
however dear a single row.
"""

from dataclasses import dataclass
from enum import Enum
from math import inf, sqrt

LEAST_SHARE, SHARE = 1.0, 0.5
"""Of a step's time without prompts: for the user who was given least, and for the others."""
PLAIN_EVERY = 16
"""Steps of which one goes without prompts, where users share them."""
STEP_MS, SHORT_STEP_MS = 200.0, 20.0
"""Of a step with prompts alone, about: who comes meanwhile waits for its end. The short one is for
where somebody else was there a moment ago, and may come back."""
SHORT_STEPS = 1.0  # as many steps without prompts, where these take longer
MOMENT_MS = 10_000.0
MIN_ALONE_ROWS, MIN_SHORT_ROWS, FIRST_ROWS = 64, 4, 4
"""FIRST_ROWS: in a step of several users while nothing is known of what rows take."""
MEMORY = 0.8  # of an average, from one step to the next
WHOLE_WORK = 16.0
"""So little is not cut further: another step costs more than these rows."""
OPENING_ROWS = 4.0
"""Rows whose attention takes as long as to read their positions in the first place: 3.6 to 5 on two
cores with AVX2, by the times of 1 to 512 rows behind 1,024 to 7,600 positions."""


class Place(Enum):
    """Of the user of a prompt: next, and nobody else's samples run; next; not next."""

    UNDISTURBING = "undisturbing"
    NEXT = "next"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class RowWork:
    """span: positions whose attention takes as long as all else of a row."""

    span: float

    def of(self, start: int, count: int) -> float:
        """Of `count` rows of which the first has `start` positions before it."""
        return self._opening(start) + count * (1 + (start + count / 2) / self.span)

    def rows(self, start: int, work: float) -> int:
        """As many rows as that is."""
        if work == inf:
            return 2**31
        at_start = 1 + start / self.span
        root = sqrt(at_start**2 + 2 * max(work - self._opening(start), 0.0) / self.span)
        return int((root - at_start) * self.span + 1e-6)

    def _opening(self, start: int) -> float:
        """Of reading what lies before the rows, however few they are."""
        return OPENING_ROWS * start / self.span


@dataclass(slots=True)
class _Purse:
    """Time beside samples, as it is granted and spent."""

    share: float
    ms: float = 0.0

    def grant(self, plain_ms: float) -> None:
        """Of another step. What was not used is lost: who comes later takes no longer steps."""
        granted_ms = self.share * plain_ms
        self.ms = min(self.ms + granted_ms, granted_ms)


@dataclass(frozen=True, slots=True)
class _Limit:
    """Of a user's prompts in one step: rows if `work` allows them, but at least so many."""

    work: float
    least_rows: int


_NOTHING, _EVERYTHING = _Limit(0.0, 0), _Limit(inf, 1)


class PrefillBudget:
    """max_rows: of a step, whoever waits."""

    def __init__(self, max_rows: int):
        self._max_rows = max_rows
        self._plain_ms: dict[int, float] = {}  # a step's without prompts, by its samples' magnitude
        self._prompt_ms = self._prompt_work = 0.0  # what prompts added, and for what
        self._since_plain = 0
        self._alone_ms = MOMENT_MS  # of steps since users shared one
        self._purses = {Place.NEXT: _Purse(LEAST_SHARE), Place.OTHER: _Purse(SHARE)}
        self._limits = dict.fromkeys(Place, _NOTHING)
        self._num_samples = self._num_rows = 0  # of this step
        self._work = self._own_work = 0.0

    # ---- a step

    def begin(self, num_samples: int, *, is_alone: bool) -> None:
        """A step in which so many samples get a token. is_alone: of one user."""
        self._num_samples, self._num_rows, self._work, self._own_work = num_samples, 0, 0.0, 0.0
        if is_alone:
            self._limits = dict.fromkeys(Place, self._alone())
            return
        self._alone_ms = 0.0
        plain_ms = self._plain_ms.get(_magnitude(num_samples))
        if num_samples and (plain_ms is None or self._since_plain >= PLAIN_EVERY):
            self._limits = dict.fromkeys(Place, _NOTHING)
            return
        self._limits = {place: self._with_samples(plain_ms, place) for place in self._purses}
        self._limits[Place.UNDISTURBING] = self._alone()

    def rows(
        self, work: RowWork, start: int, most: int, place: Place, work_left: float = inf
    ) -> int:
        """How many more rows a prompt may have computed behind its first `start` tokens. work_left:
        of the step, which is to be short."""
        limit = self._limits[place]
        least_rows = min(limit.least_rows, MIN_SHORT_ROWS if work_left < inf else self._max_rows)
        least = least_rows - self._num_rows
        within = max(work.rows(start, min(limit.work - self._work, work_left)), least)
        if 0 < within < most and work.of(start, most) <= WHOLE_WORK:
            within = most
        return max(min(most, within, self._max_rows - self._num_rows), 0)

    def take(self, work: RowWork, start: int, count: int, place: Place) -> None:
        """They are in the step."""
        self._num_rows += count
        self._work += work.of(start, count)
        if place is Place.UNDISTURBING:
            self._own_work += work.of(start, count)

    def took(self, ms: float) -> None:
        """The step is over."""
        self._alone_ms += ms
        if self._num_rows:
            self._since_plain += 1
            plain_ms = self._plain_ms.get(_magnitude(self._num_samples), 0.0)
            added_ms = max(ms - plain_ms, 0.0)
            self._prompt_ms = MEMORY * self._prompt_ms + added_ms
            self._prompt_work = MEMORY * self._prompt_work + self._work
            if self._num_samples:
                for purse in self._purses.values():
                    purse.ms -= added_ms * (1 - self._own_work / self._work)
        elif self._num_samples:
            self._since_plain = 0
            magnitude = _magnitude(self._num_samples)
            before = self._plain_ms.get(magnitude, ms)
            self._plain_ms[magnitude] = MEMORY * before + (1 - MEMORY) * ms

    # ---- limits

    def _alone(self) -> _Limit:
        """For a user whom nobody waits for."""
        if self._alone_ms < MOMENT_MS:
            plain_ms = self._plain_ms.get(_magnitude(1), 0.0)
            return self._within(max(SHORT_STEP_MS, SHORT_STEPS * plain_ms), MIN_SHORT_ROWS)
        return self._within(STEP_MS, MIN_ALONE_ROWS)

    def _with_samples(self, plain_ms: float | None, place: Place) -> _Limit:
        if plain_ms is None or not self._prompt_work:
            return _Limit(0.0, FIRST_ROWS)
        purse = self._purses[place]
        purse.grant(plain_ms)
        return self._within(purse.ms, 1) if purse.ms > 0 else _NOTHING

    def _within(self, ms: float, least_rows: int) -> _Limit:
        if not self._prompt_ms:
            return _EVERYTHING
        return _Limit(ms * self._prompt_work / self._prompt_ms, least_rows)


def _magnitude(num_samples: int) -> int:
    return max(num_samples, 1).bit_length()
