"""What requests to a target and its drafters take, as measured: seconds over tokens."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

DECAY = 0.95
"""Of what was measured before, with each request: other requests come and go beside it."""
LARGEST_SURPRISE = 4.0
"""Times what was expected, beyond which a request was held up by something else."""
TOKENS = 100


@dataclass(slots=True)
class LineFit:
    """Least squares of y over x, both at least 0, forgetting with DECAY."""

    weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        if self.weight >= 2:
            y = min(y, LARGEST_SURPRISE * self.at(x))
        for name, value in (("weight", 1), ("_x", x), ("_y", y), ("_xx", x * x), ("_xy", x * y)):
            setattr(self, name, DECAY * getattr(self, name) + value)

    def at(self, x: float) -> float:
        """NaN where nothing was measured. Where all was measured at one place, more takes
        proportionally more, and less as much."""
        if not self.weight:
            return math.nan
        intercept, slope = self.line
        return intercept + slope * x if slope is not None else intercept * max(1.0, x / self._mean)

    @property
    def line(self) -> tuple[float, float | None]:
        """Intercept and slope, neither below 0. None: all was measured at one place."""
        mean, y = self._mean, self._y / self.weight
        variance = self._xx / self.weight - mean**2
        if variance <= 1e-3 * mean**2:
            return y, None
        slope = (self._xy / self.weight - mean * y) / variance
        slope = min(max(0.0, slope), y / mean if mean else 0.0)
        return y - slope * mean, slope

    @property
    def _mean(self) -> float:
        return self._x / self.weight


@dataclass(slots=True)
class TokenTime:
    """Of a token in a stream, the mean over about the last TOKENS of them."""

    _tokens: float = 0.0
    _seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        if self._tokens:
            seconds = min(seconds, LARGEST_SURPRISE * tokens * self.seconds)
        decay = (1 - 1 / TOKENS) ** tokens
        self._tokens = decay * self._tokens + tokens
        self._seconds = decay * self._seconds + seconds

    @property
    def seconds(self) -> float:
        """NaN where nothing was measured."""
        return self._seconds / self._tokens if self._tokens else math.nan


@dataclass(slots=True)
class RoundCosts:
    """Of an upstream, in seconds. token: that it streams. opened: until the first tokens of a
    stream behind a verification, without their own time. verified: a verification. Both are over
    the tokens that they compute, with the prompt's where those are read again.
    closed: what one takes more where a stream is closed for it, whose next token has begun.
    repeated_s: what a verification takes more, in the mean, as some need several requests. drafted:
    over tokens that are asked of drafters. unverified_s: streamed since the last verification."""

    token: TokenTime = field(default_factory=TokenTime)
    opened: LineFit = field(default_factory=LineFit)
    verified: LineFit = field(default_factory=LineFit)
    closed: LineFit = field(default_factory=LineFit)
    drafted: LineFit = field(default_factory=LineFit)
    repeated_s: float = 0.0
    unverified_s: float = 0.0

    @property
    def are_known(self) -> bool:
        """Those between which a draft is decided."""
        return self.token.seconds > 0 and self.verified.weight > 0

    def was_streamed(self, tokens: int, seconds: float) -> None:
        """Tokens after a stream's first ones."""
        self.unverified_s += seconds
        self.token.add(tokens, seconds)

    def was_opened(self, tokens: int, seconds: float, rows: int, *, is_reopened: bool) -> None:
        """A stream, with its first tokens. is_reopened: behind a verification; a sample's first one
        reads its prompt, which no later one does."""
        self.unverified_s += seconds
        if is_reopened and self.token.seconds > 0:
            self.opened.add(rows, max(0.0, seconds - tokens * self.token.seconds))

    def was_verified(
        self, rows: int, seconds: float, *, closes_stream: bool, num_requests: int = 1
    ) -> None:
        self.unverified_s = 0.0
        more_s = max(0.0, seconds - self.verified.at(rows)) if self.verified.weight else 0.0
        repeated_s = more_s if num_requests > 1 else 0.0
        self.repeated_s += (1 - DECAY) * (repeated_s - self.repeated_s)
        if num_requests > 1:
            return
        if closes_stream and self.verified.weight:
            self.closed.add(1, more_s)
        else:
            self.verified.add(rows, seconds)


class StreamTimer:
    """Of one stream, from its request on. The time until `resume`, in which nobody waits for the
    target, is left out; that of a draft is not, during which the target samples on."""

    def __init__(
        self,
        costs: RoundCosts,
        clock: Callable[[], float],
        rows: int,
        *,
        is_reopened: bool,
    ):
        self._costs = costs
        self._clock = clock
        self._rows = rows
        self._is_reopened = is_reopened
        self._is_open = False
        self._began = clock()

    def add(self, tokens: int) -> None:
        now = self._clock()
        duration_s, self._began = now - self._began, now
        if self._is_open:
            self._costs.was_streamed(tokens, duration_s)
            return
        self._is_open = True
        self._costs.was_opened(tokens, duration_s, self._rows, is_reopened=self._is_reopened)

    def resume(self) -> None:
        self._began = self._clock()
