"""Another drafter, held to the contract: whatever it does, it costs no more than speed.

What the contract does not allow becomes an empty draft and is counted. A drafter runs in this
thread, so that one that never answers, or that writes into its streams, is beyond this guard.
"""

import math
import operator
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tinkercloud.speculative.drafters.draft_distribution import DraftDistribution
from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft, Drafter, Stream

NUM_EXCEPTIONS = 3  # after these the drafter is off


class GuardedDrafter(Drafter):
    """Held to tokens 0..vocab_size - 1, and to the rest of the contract.

    num_refused: drafts by what was wrong: "exception", "answer" (all drafts of a call), "form",
    "length", "vocabulary", "confidence", "law" (a distribution that cannot have given the token).
    off_reason: None while the drafter is asked.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.name = drafter.name
        self.is_coupled = drafter.is_coupled
        self.layers = drafter.layers
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._begun: set[int] = set()
        self.num_refused: Counter[str] = Counter()
        self.off_reason: str | None = None

    def begin(self, stream: Stream) -> None:
        if self._succeeds(lambda: self._drafter.begin(stream)):
            self._begun.add(stream.id)

    def observe(self, stream: Stream, num_new: int) -> None:
        if stream.id in self._begun:
            self._succeeds(lambda: self._drafter.observe(stream, num_new))

    def observe_hidden(self, stream: Stream, first: int, hidden: Tensor) -> None:
        if stream.id in self._begun:
            self._succeeds(lambda: self._drafter.observe_hidden(stream, first, hidden))

    def end(self, stream: Stream) -> None:
        if stream.id in self._begun:
            self._begun.remove(stream.id)
            self._succeeds(lambda: self._drafter.end(stream))

    def catch_up(self, streams: Sequence[Stream]) -> None:
        begun = [stream for stream in streams if stream.id in self._begun]
        if begun:
            self._succeeds(lambda: self._drafter.catch_up(begun))

    def propose(
        self, requests: Sequence[tuple[Stream, int]], unsure_below: float = 0.0
    ) -> list[Draft]:
        self._drafter.unsure_below = unsure_below
        drafts = [NO_DRAFT] * len(requests)
        places = [
            i for i, (stream, most) in enumerate(requests) if stream.id in self._begun and most
        ]
        if places:
            self._succeeds(lambda: self._fill(drafts, requests, places))
        return drafts

    def snapshot(self) -> Mapping[str, Any]:
        return self._drafter.snapshot()

    def _fill(
        self, drafts: list[Draft], requests: Sequence[tuple[Stream, int]], places: Sequence[int]
    ) -> None:
        answer: object = self._drafter.propose([requests[i] for i in places])
        if not isinstance(answer, list) or len(answer) != len(places):
            self.num_refused["answer"] += 1
            return
        for i, draft in zip(places, answer, strict=True):
            try:
                drafts[i], reason = self._checked(draft, requests[i][1])
            except (TypeError, ValueError, OverflowError):
                reason = "form"
            if reason:
                self.num_refused[reason] += 1

    def _checked(self, draft: object, most: int) -> tuple[Draft, str]:
        """The draft in plain numbers and "", or none and what is wrong with it. Raises TypeError,
        ValueError or OverflowError where it is not made of the types of a `Draft`."""
        if not isinstance(draft, Draft):
            raise TypeError
        parts = (draft.tokens, draft.confidences, draft.distributions)
        if not all(isinstance(part, tuple) for part in parts):
            raise TypeError
        if len(draft.tokens) > most or len(draft.confidences) != len(draft.tokens):
            return NO_DRAFT, "length"
        tokens = tuple(map(operator.index, draft.tokens))
        confidences = tuple(map(float, draft.confidences))
        if not all(0 <= token < self._vocab_size for token in tokens):
            return NO_DRAFT, "vocabulary"
        if not all(math.isfinite(share) and 0 <= share <= 1 for share in confidences):
            return NO_DRAFT, "confidence"
        if draft.distributions and not self._can_give(draft.distributions, tokens):
            return NO_DRAFT, "law"
        return Draft(tokens, confidences, draft.distributions), ""

    def _can_give(self, distributions: Sequence[object], tokens: Sequence[int]) -> bool:
        """Whether each token has a distribution that can give it. Raises TypeError where one is
        none."""
        if len(distributions) != len(tokens):
            return False
        for distribution, token in zip(distributions, tokens, strict=True):
            if not isinstance(distribution, DraftDistribution):
                raise TypeError
            if not distribution.can_give(token, self._vocab_size):
                return False
        return True

    def _succeeds(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever it is, samples go on without drafts
            self.num_refused["exception"] += 1
            if self.num_refused["exception"] >= NUM_EXCEPTIONS and self.off_reason is None:
                self._drafter = Drafter()
                last = traceback.format_exception_only(error)[-1].strip()
                self.off_reason = f"{NUM_EXCEPTIONS} exceptions, the last {last}"
            return False
        return True
