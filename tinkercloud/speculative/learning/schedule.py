"""When a draft is trained, and for how long."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TriggerSettings:
    """every_steps: of the policy, 0 for never. fall: of the smoothed acceptance under its peak
    since the last update. decay: of the smoothing, per observation. Where no policy makes steps,
    so many new cases are enough while less than `goal` of the drafted tokens are accepted."""

    every_steps: int = 1
    fall: float = 0.03
    decay: float = 0.8
    goal: float = 0.8
    least_cases: int = 512


LEAST_JUDGED = 64  # tokens, of which a share accepted is taken for the draft's
MOST_PATIENCE = 64  # times as many cases after trainings that made nothing better


ASKED = "asked for"
TRAINING_IS_OVER = (
    "training of drafts has failed, and is off until the server starts again; its log says why"
)


class Trigger:
    """Says when a training is due: when somebody asked for one, after so many policy steps, when
    acceptance has fallen, or when enough was collected of what a draft with room for more can learn
    from. is_asked: until a training has ended since."""

    def __init__(self, settings: TriggerSettings):
        self._settings = settings
        self._updated_at = 0
        self.smoothed: float | None = None
        self.peak = 0.0
        self.num_cases = self._num_judged = self._num_accepted = 0
        self._patience = 1
        self.is_asked = False

    def collected(self, num_cases: int) -> None:
        self.num_cases += num_cases

    def judged(self, num_judged: int, num_accepted: int) -> None:
        """Of the drafted tokens, in one round."""
        self._num_judged += num_judged
        self._num_accepted += num_accepted

    def observe(self, acceptance: float) -> None:
        decay = self._settings.decay
        before = acceptance if self.smoothed is None else self.smoothed
        self.smoothed = decay * before + (1 - decay) * acceptance
        self.peak = max(self.peak, self.smoothed)

    def due(self, step: int) -> str | None:
        """The reason, or None."""
        if self.is_asked:
            return ASKED
        every = self._settings.every_steps
        if every and self.steps_since_update(step) >= every:
            return f"{self.steps_since_update(step)} policy steps"
        if self.smoothed is not None and self.smoothed <= self.peak - self._settings.fall:
            return f"acceptance fell from {self.peak:.3f} to {self.smoothed:.3f}"
        enough = self.num_cases >= self._patience * self._settings.least_cases
        return f"{self.num_cases} new cases" if enough and self._has_room else None

    def steps_since_update(self, step: int) -> int:
        """Steps of the policy since a training ended."""
        return step - self._updated_at

    def updated(self, step: int, *, better: bool = True) -> None:
        """A draft was trained: from here on the peak is that of the new draft. One that is no
        `better` has the next wait for twice as many cases."""
        self._updated_at = step
        self.is_asked = False
        self.smoothed, self.peak = None, 0.0
        self.num_cases = self._num_judged = self._num_accepted = 0
        self._patience = 1 if better else min(2 * self._patience, MOST_PATIENCE)

    @property
    def _has_room(self) -> bool:
        """Also where next to nothing was drafted: then drafts do not pay yet."""
        goal = self._settings.goal
        return self._num_judged < LEAST_JUDGED or self._num_accepted < goal * self._num_judged


class TimeBudget:
    """One kind of work may take `share` of the time that the policy's own steps take.

    Time that one piece of work exceeds is owed; time that is not used is kept, up to `most_s`.
    Quiet time, in which nobody waits, costs nothing and is counted by itself.
    """

    def __init__(
        self,
        share: float = 0.1,
        most_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.share, self.most_s = share, most_s
        self.left_s = 0.0
        self.earned_s = self.spent_s = self.quiet_s = self._last_earned_s = 0.0
        self._clock = clock

    def step_took(self, seconds: float) -> None:
        """One of the policy's steps, rollouts and training together."""
        earned = self.share * seconds
        self.earned_s += earned
        self._last_earned_s = earned
        self.left_s = min(self.left_s + earned, self.most_s)

    @property
    def may_borrow(self) -> bool:
        """For work that cannot wait: no more is owed than one step earns. The first is free to
        begin, whatever it takes."""
        return self.left_s > -self._last_earned_s or not self.spent_s

    @property
    def is_overdue(self) -> bool:
        """More than two steps' time is unused: there is no better moment to wait for."""
        return self.left_s > 2 * self._last_earned_s

    @contextmanager
    def spending(self, *, quiet: bool = False) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            elapsed_s = self._clock() - began
            if quiet:
                self.quiet_s += elapsed_s
            else:
                self.left_s -= elapsed_s
                self.spent_s += elapsed_s
