"""What drafts are trained on, as batches: mostly new items, some replayed ones; a part is held out.

Which items are held out follows from a digest of their tokens, so that no text is on both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tinkercloud.embedded.draft_training.capture import CapturedSequence
from tinkercloud.embedded.draft_training.model_trainer import CaseExample
from tinkercloud.speculative.learning.cases import Case, CaseStore, digest
from tinkercloud.speculative.learning.replay_buffer import ReplayBuffer, sample_mix

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mix:
    """share: of new items in a batch; the others are replayed. One of `held_out_one_in` texts is
    held out; evaluations use at most `most_held_out` of them, of the last `recent` versions, or the
    newest where there are none of these.
    window: tokens of a sequence that a batch or an evaluation has at most, so that a step's time
    does not depend on how long samples are; None for all."""

    batch_size: int = 8
    share: float = 0.8
    held_out_one_in: int = 8
    most_held_out: int = 64
    recent: int = 1
    seed: int = 0
    window: int | None = None

    def holds_out(self, text: str) -> bool:
        """text: a digest."""
        return int(text[:8], 16) % self.held_out_one_in == 0

    def generator(self, number: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, number))


class SequenceDataset:
    """For heads: whole sequences of the policy, bounded in bytes, none older than `max_age`
    versions. New are those that the newest version wrote."""

    def __init__(self, max_bytes: int, max_age: int, mix: Mix):
        self._max_age, self._mix = max_age, mix
        one_in = mix.held_out_one_in
        self._buffer: ReplayBuffer[CapturedSequence] = ReplayBuffer(max_bytes - max_bytes // one_in)
        self._held_out: ReplayBuffer[CapturedSequence] = ReplayBuffer(max_bytes // one_in)
        self._epoch = 0

    @property
    def num_bytes(self) -> int:
        return self._buffer.num_bytes + self._held_out.num_bytes

    def add(self, sequence: CapturedSequence) -> None:
        held = self._mix.holds_out(digest(sequence.tokens))
        (self._held_out if held else self._buffer).add(sequence, sequence.num_bytes)
        self._epoch = max(self._epoch, sequence.epoch)
        for buffer in (self._buffer, self._held_out):
            buffer.expire(self._epoch - self._max_age)

    def batch(self, number: int) -> list[CapturedSequence]:
        new = [s for s in self._buffer if s.epoch == self._epoch]
        old = [s for s in self._buffer if s.epoch != self._epoch]
        mix, generator = self._mix, self._mix.generator(number)
        chosen = sample_mix(new, old, mix.batch_size, mix.share, generator)
        return [_cut_to(sequence, mix.window, float(generator.random())) for sequence in chosen]

    def held_out(self) -> list[list[CapturedSequence]]:
        if not len(self._buffer):
            return []
        current = [s for s in self._held_out if s.epoch > self._epoch - self._mix.recent]
        # Few are captured where time is short, and none of the last versions may be among them.
        current = (current or list(self._held_out))[-self._mix.most_held_out :]
        window = self._mix.window
        return _cut([_cut_to(s, window, 0.5) for s in current], self._mix.batch_size)


def _cut_to(sequence: CapturedSequence, window: int | None, place: float) -> CapturedSequence:
    """place: 0 for the first tokens that are learned from, 1 for the last ones. A sequence's prompt
    comes before them and teaches nothing."""
    length = len(sequence.tokens)
    if window is None or length <= window:
        return sequence
    begins = int(np.argmax(sequence.weights > 0))
    first = min(begins, length - window)
    return sequence.window(first + round(place * (length - window - first)), window)


class CaseDataset:
    """For draft models: disagreements count as new, agreed cases are replayed."""

    def __init__(self, store: CaseStore, mix: Mix):
        self._store, self._mix = store, mix

    def batch(self, number: int) -> list[CaseExample]:
        mix = self._mix
        cases = self._store.sample(
            mix.batch_size, mix.generator(number), mix.share, where=self._is_trained_on
        )
        return [self._example(case) for case in cases]

    def held_out(self) -> list[list[CaseExample]]:
        cases = [*self._store.disagreed, *self._store.agreed]
        if not any(map(self._is_trained_on, cases)):
            return []
        oldest = max(case.epoch for case in cases) - self._mix.recent
        held = [c for c in cases if c.epoch > oldest and not self._is_trained_on(c)]
        held = held[-self._mix.most_held_out :]
        return _cut([self._example(c) for c in held], self._mix.batch_size)

    def _is_trained_on(self, case: Case) -> bool:
        return not self._mix.holds_out(case.context)

    def _example(self, case: Case) -> CaseExample:
        return CaseExample(self._store.tokens(case), case)


def _cut(items: Sequence[T], size: int) -> list[list[T]]:
    return [list(items[i : i + size]) for i in range(0, len(items), size)]
