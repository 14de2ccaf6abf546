"""Drafts made before they are asked for: for what the target may say to those that it has.

It takes a draft whole, or up to a place where it draws the second likeliest token instead; and then
it may do either with the draft that was prepared for that.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft

ACCEPTED, SECOND = (0.7, 0.75, 0.8, 0.9), 0.3
"""What is taken for true at first: of tokens by confidence, the share that is accepted, and of
those that are not, the share in whose place the target draws the second likeliest."""
PRIOR_TOKENS = 8
MAX_GUESSES = 12  # of a sample in a round; an engine keeps 16


class Calibration:
    """How often the target's tokens were those of drafts, by confidence: it says more where drafts
    are drawn with the target's noise than a token's probability does."""

    def __init__(self) -> None:
        self._accepted = [[PRIOR_TOKENS * share, PRIOR_TOKENS] for share in ACCEPTED]
        self._second = [PRIOR_TOKENS * SECOND, PRIOR_TOKENS]

    @property
    def second(self) -> float:
        return self._second[0] / self._second[1]

    def acceptance(self, confidence: float) -> float:
        accepted, judged = self._accepted[_bin(confidence)]
        return accepted / judged

    def learn(self, draft: Draft, tokens: Sequence[int]) -> None:
        """tokens: how the sample went on."""
        for place, (drafted, token) in enumerate(zip(draft.tokens, tokens, strict=False)):
            counts = self._accepted[_bin(draft.confidences[place])]
            counts[0] += drafted == token
            counts[1] += 1
            if drafted != token:
                if draft.seconds:
                    self._second[0] += draft.seconds[place] == token
                    self._second[1] += 1
                return


def _bin(confidence: float) -> int:
    return min(len(ACCEPTED) - 1, int(confidence * len(ACCEPTED)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens that the target may add to a sample, and how many more are then to be drafted."""

    after: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Guess:
    """How a sample may go on after its first `base` tokens: with `after`, and then the draft."""

    base: int
    after: tuple[int, ...]
    draft: Draft

    def rest(self, tokens: Sequence[int], most: int) -> Draft:
        """What it says after the sample's tokens; none where they are others than it assumed."""
        new = tuple(tokens[self.base :])
        first = len(new) - len(self.after)
        if first < 0 or (*self.after, *self.draft.tokens)[: len(new)] != new:
            return NO_DRAFT
        part = slice(first, first + most)
        draft = self.draft
        return Draft(draft.tokens[part], draft.confidences[part], seconds=draft.seconds[part])


class Outlook:
    """Of a sample that was answered when it had `base` tokens: what was prepared, and what may
    be next. most: tokens of a draft that the engine wants."""

    def __init__(self, base: int, most: int, answer: Draft, calibration: Calibration):
        self.base, self._most, self._calibration = base, most, calibration
        self.guesses = [Guess(base, (), answer)]
        # Entries have numbers, since outcomes have no order; a chance is that of the outcome.
        self._open: list[tuple[float, int, Outcome]] = []
        self._num_open = 0
        self._add(1.0, (), answer)

    def likeliest(self, count: int) -> list[tuple[float, Outcome]]:
        """The next to prepare for, with what `prepared` wants to know; each once."""
        count = min(count, MAX_GUESSES - len(self.guesses), len(self._open))
        likeliest = [heapq.heappop(self._open) for _ in range(count)]
        return [(-negative, outcome) for negative, _, outcome in likeliest]

    def put_back(self, chance: float, outcome: Outcome) -> None:
        self._num_open += 1
        heapq.heappush(self._open, (-chance, self._num_open, outcome))

    def prepared(self, chance: float, outcome: Outcome, draft: Draft) -> None:
        self.guesses.append(Guess(self.base, outcome.after, draft))
        self._add(chance, outcome.after, draft)

    def learn(self, tokens: Sequence[int]) -> None:
        """From what the sample's tokens have become."""
        self._calibration.learn(self.guesses[0].draft, tokens[self.base :])

    def answer(self, tokens: Sequence[int], most: int) -> Draft:
        """A draft of `most` tokens that is here already, or none."""
        drafts = (guess.rest(tokens, most) for guess in self.guesses)
        return next((draft for draft in drafts if len(draft.tokens) == most), NO_DRAFT)

    def _add(self, chance: float, after: tuple[int, ...], draft: Draft) -> None:
        reached = chance
        for place, confidence in enumerate(draft.confidences):
            accepted = self._calibration.acceptance(confidence)
            if draft.seconds:
                taken = (*after, *draft.tokens[:place], draft.seconds[place])
                second = reached * (1 - accepted) * self._calibration.second
                self.put_back(second, Outcome(taken, self._most))
            reached *= accepted
        # One more: the first of it is what the target adds to a draft that it takes whole.
        self.put_back(reached, Outcome((*after, *draft.tokens), self._most + 1))
