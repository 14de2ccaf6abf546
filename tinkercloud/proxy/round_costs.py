"""What requests to a target and its drafters take, as measured: seconds over tokens."""

import math
from dataclasses import dataclass, field

DECAY = 0.95
"""Of what was measured before, with each request: other requests come and go beside it."""
LARGEST_SURPRISE = 4.0
"""Times what was expected, beyond which a request was held up by something else."""


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
class RoundCosts:
    """In seconds. plain: over tokens that the target samples itself. verified: over tokens that a
    verification computes, with the prompt's where the target computes it anew. drafted: over
    tokens that are asked of drafters."""

    plain: LineFit = field(default_factory=LineFit)
    verified: LineFit = field(default_factory=LineFit)
    drafted: LineFit = field(default_factory=LineFit)
