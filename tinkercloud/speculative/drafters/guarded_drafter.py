"""Another drafter, held to the contract: whatever it does, it costs no more than speed.

What is not allowed becomes an empty draft and is counted. A drafter runs in this thread, so that
one that never answers, or that writes into its streams, is beyond what can be guarded here.
"""

import math
import operator
import traceback
from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from tinkercloud.speculative.drafters.draft_distribution import DraftDistribution
from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft, Drafter, SilentDrafter, Stream

NUM_EXCEPTIONS = 3  # after these the drafter is off


class GuardedDrafter:
    """num_refused: by what was wrong: "exception", "answer" (all drafts of a call), "form",
    "length", "vocabulary", "confidence", "law". off_reason: None while the drafter is asked."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._name = drafter.name
        self.is_coupled = drafter.is_coupled
        self.layers = drafter.layers
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._begun: set[int] = set()
        self.num_refused: Counter[str] = Counter()
        self.off_reason: str | None = None

    @property
    def name(self) -> str:
        return self._name

    def begin(self, stream: Stream) -> None:
        if self._tried(lambda: self._drafter.begin(stream)):
            self._begun.add(stream.id)

    def observe(self, stream: Stream, num_new: int) -> None:
        if stream.id in self._begun:
            self._tried(lambda: self._drafter.observe(stream, num_new))

    def see(self, stream: Stream, first: int, hidden: Tensor) -> None:
        if stream.id in self._begun:
            self._tried(lambda: self._drafter.see(stream, first, hidden))

    def end(self, stream: Stream) -> None:
        if stream.id in self._begun:
            self._begun.remove(stream.id)
            self._tried(lambda: self._drafter.end(stream))

    def propose(self, asked: Sequence[tuple[Stream, int]]) -> list[Draft]:
        drafts = [NO_DRAFT for _ in asked]
        known = [i for i, (stream, most) in enumerate(asked) if stream.id in self._begun and most]
        if known:
            self._tried(lambda: self._fill(drafts, asked, known))
        return drafts

    def _fill(
        self, drafts: list[Draft], asked: Sequence[tuple[Stream, int]], known: Sequence[int]
    ) -> None:
        answer: object = self._drafter.propose([asked[i] for i in known])
        if not isinstance(answer, list) or len(answer) != len(known):
            self.num_refused["answer"] += 1
            return
        for i, draft in zip(known, answer, strict=True):
            drafts[i] = self._checked(draft, asked[i][1])

    def _checked(self, draft: object, most: int) -> Draft:
        try:
            clean, wrong = self._read(draft, most)
        except (TypeError, ValueError, OverflowError):
            clean, wrong = NO_DRAFT, "form"
        if wrong:
            self.num_refused[wrong] += 1
            return NO_DRAFT
        return clean

    def _read(self, draft: object, most: int) -> tuple[Draft, str]:
        """The draft in plain numbers, and what is wrong with it, or ""."""
        if not isinstance(draft, Draft):
            raise TypeError
        tokens, confidences = draft.tokens, draft.confidences
        distributions = draft.distributions
        if not all(isinstance(part, tuple) for part in (tokens, confidences, distributions)):
            raise TypeError
        if len(tokens) > most or len(confidences) != len(tokens):
            return NO_DRAFT, "length"
        tokens = tuple(map(operator.index, tokens))
        confidences = tuple(map(float, confidences))
        if not all(0 <= token < self._vocab_size for token in tokens):
            return NO_DRAFT, "vocabulary"
        if not all(math.isfinite(share) and 0 <= share <= 1 for share in confidences):
            return NO_DRAFT, "confidence"
        if distributions and not self._gave(distributions, tokens):
            return NO_DRAFT, "law"
        return Draft(tokens, confidences, distributions), ""

    def _gave(self, distributions: Sequence[object], tokens: Sequence[int]) -> bool:
        """Whether each token has a distribution that can give it. Raises TypeError where one
        is none."""
        if len(distributions) != len(tokens):
            return False
        for distribution, token in zip(distributions, tokens, strict=True):
            if not isinstance(distribution, DraftDistribution):
                raise TypeError
            if not distribution.can_give(token, self._vocab_size):
                return False
        return True

    def _tried(self, call: Callable[[], None]) -> bool:
        """Whether it went well."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever it is, samples go on without drafts
            self.num_refused["exception"] += 1
            if self.num_refused["exception"] >= NUM_EXCEPTIONS:
                self._switch_off(error)
            return False
        return True

    def _switch_off(self, error: Exception) -> None:
        self._drafter = SilentDrafter()
        if self.off_reason is None:
            last = traceback.format_exception_only(error)[-1].strip()
            self.off_reason = f"{NUM_EXCEPTIONS} exceptions, the last {last}"
