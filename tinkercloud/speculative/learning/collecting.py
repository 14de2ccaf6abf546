"""Collects disagreements of draft and target while samples are written.

There are more than training can use, and looking at one costs time of the sampling thread. So a
rate limit bounds the cases per second, and a sample's cases wait until it ends: they then share one
context.

Axes: M most probable tokens of the target.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from tinkercloud.speculative.drafters.drafter import Stream
from tinkercloud.speculative.head.losses import most_probable
from tinkercloud.speculative.learning.cases import Case, CaseStore, digest


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """per_second: cases, at most. burst: at once after a pause. top: of the target's most probable
    tokens, kept in a case. agreed_one_in: of the cases in which draft and target agreed."""

    per_second: float = 20.0
    burst: float = 40.0
    top: int = 32
    agreed_one_in: int = 4


@dataclass(frozen=True, slots=True)
class JudgedToken:
    """A drafted token, and the target's token of the same place; position: its index in the
    sample's tokens. distribution: the target's probabilities there, (1, V)."""

    position: int
    drafted: int
    target: int
    distribution: Callable[[], Tensor]


class CaseCollector:
    """Owned by the thread that samples."""

    def __init__(
        self,
        store: CaseStore,
        settings: CollectorSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.store = store
        self._settings = settings or CollectorSettings()
        self._clock = clock
        self._left = self._settings.burst
        self._last_s = clock()
        self._num_agreed = 0
        self._waiting: dict[int, list[Case]] = {}  # by stream

    def judged(self, stream: Stream, token: JudgedToken, category: str) -> None:
        if not self._is_within_rate(agreed=token.drafted == token.target):
            return
        probs, ids = self._most_probable(token)
        case = Case(
            "", token.position, token.drafted, token.target, ids, probs,
            stream.params.temperature, stream.version, stream.epoch, category,
        )  # fmt: skip
        self._waiting.setdefault(stream.id, []).append(case)

    def ended(self, stream: Stream) -> None:
        """Its cases go to the store; the newest version decides which are too old."""
        waiting = self._waiting.pop(stream.id, [])
        if not waiting:
            return
        tokens = np.array(stream.tokens, np.int32)
        context = digest(tokens)
        for case in waiting:
            self.store.add(tokens, case.within(context))
        self.store.expire(stream.epoch)

    def _is_within_rate(self, *, agreed: bool) -> bool:
        now = self._clock()
        earned = (now - self._last_s) * self._settings.per_second
        self._left, self._last_s = min(self._left + earned, self._settings.burst), now
        if agreed:
            self._num_agreed += 1
            if self._num_agreed % self._settings.agreed_one_in:
                return False
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def _most_probable(self, token: JudgedToken) -> tuple[np.ndarray, np.ndarray]:
        distribution = token.distribution()
        drafted = distribution.new_full((1,), token.drafted).long()
        teacher = most_probable(distribution, self._settings.top, drafted)
        assert teacher.ids is not None
        ids = teacher.ids[0].cpu().numpy().astype(np.int32)
        return teacher.probs[0].cpu().numpy().astype(np.float32), ids
