"""A running check that drafted tokens are accepted as often as the target's distribution says.

z = sum(s_i - a_i) / sqrt(sum a_i (1 - a_i)) over a window, with s_i 1 where token i is accepted and
a_i its chance of that. The chance is taken before its own verdict and after those before it, so
that the differences are a martingale's and z is near a standard normal, whatever is drafted.

For a drafter that does not know the target's noise a_i = p(x_i), the target's distribution after
temperature, top-k and top-p. A coupled one draws with the same noise, so that its tokens are
accepted more often. Its a_i is `verify.coupled_chance` of the distribution that x_i was drawn from,
reported by one draft in `draft_distribution.AUDIT_EVERY`, and is conditional on x_i: which tokens
are verified follows from the drafter's confidence in them, and the mean over all that might have
been drafted is not the mean over those.

What this very sample wrote before (same seed, same index) was drawn with the noise of now, and the
same draft would have the same verdict again: neither is counted.

A draft tested at the wrong position, noise that is used twice, a cache that is one token off: each
shows here without a reference to compare with.
"""

from collections import deque
from dataclasses import dataclass, field
from math import sqrt

ALARM = 5.0
LEAST_TOKENS = 200
BLOCK_TOKENS, NUM_BLOCKS = 64, 64
LEAST_VARIANCE = 1.0 / ALARM**2
"""One token that was as good as impossible, or as certain, is not yet an alarm; two are."""


@dataclass(slots=True)
class Block:
    tokens: int = 0
    excess: float = 0.0
    variance: float = 0.0


@dataclass(slots=True)
class Calibration:
    """Of the last BLOCK_TOKENS * NUM_BLOCKS tokens."""

    _blocks: deque[Block] = field(default_factory=lambda: deque([Block()], NUM_BLOCKS))

    def add(self, accepted: bool, chance: float) -> None:
        """A drafted token got its verdict; chance in [0, 1]."""
        if self._blocks[-1].tokens >= BLOCK_TOKENS:
            self._blocks.append(Block())
        block = self._blocks[-1]
        block.tokens += 1
        block.excess += float(accepted) - chance
        block.variance += chance * (1.0 - chance)

    @property
    def num_tokens(self) -> int:
        return sum(block.tokens for block in self._blocks)

    @property
    def z(self) -> float:
        """Standard deviations by which more are accepted than expected."""
        variance = sum(block.variance for block in self._blocks)
        return sum(block.excess for block in self._blocks) / sqrt(max(variance, LEAST_VARIANCE))

    @property
    def alarms(self) -> bool:
        return self.num_tokens >= LEAST_TOKENS and abs(self.z) > ALARM
