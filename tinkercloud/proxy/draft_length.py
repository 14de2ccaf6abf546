"""Whether a draft is worth a verification, by what requests to the target take, as measured.

Axes: K drafted tokens.
"""

import math
from bisect import bisect
from collections.abc import Callable, Sequence

from tinkercloud.proxy.round_costs import RoundCosts
from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft

FIRST_ASKED, MOST_WAITED = 4, 64
MARGIN = 1.2
"""Times what it takes, that a verification for which a stream is closed has to save: what a draft
is worth is an estimate, and tokens that the target streams cost nothing more."""
STREAM_SHARE = 0.7
"""Of what it takes to close a stream and to open the next: what a verification is charged with that
closes one, as others mostly follow it, and what one is granted while none is open, without which
one would be opened, mostly to be closed again."""
LEAST_SHARE = 0.7
"""Of a verification's time, that it is charged with whatever it is granted: else verifications that
bring nothing could follow each other for ever. On twelve texts of SmolLM2, with what requests to
six servers take, answers come 1.75 times as fast in the geometric mean (simulated), before vLLM on
two processors 1.30 and 1.70 times; with the margin everywhere and 0.3 granted, whatever is left of
a verification, 1.72 times, 1.27 and 1.64."""
FREE = 0.05  # of a token's time: a draft that takes less is asked for at each token
LOOK_AGAIN = 0.02
"""Of the time that was streamed since the last verification: what another one may take, if drafts
would be worth it at half of the cost. So an estimate that became too high is corrected."""
PRIOR = 2.0  # tokens
MEMORY = 64.0  # tokens
CONFIDENCES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.92, 0.97)
"""Of a drafter's confidence: between these it is taken to mean the same."""


class AcceptanceRate:
    """How often the next drafted token is the sample's, by how many in a row were so before, and by
    the drafter's confidence in it, where it has one.

    Texts that repeat others for long go on repeating, others fail at the same length again. After
    n right ones the next is right with the chance (n + 1) / (n + 3), by which n + 1 more are
    expected in all; what was seen of this sample soon outweighs that. It holds for any drafter: of
    one that copies text, the row is the length of its match. Its confidence, as far as it is
    right, says which of a form's tokens change from line to line.
    """

    def __init__(self) -> None:
        self.num_right = 0  # in a row
        # Right ones and all, by row and confidence, each of them None where all are counted.
        self._counts: dict[tuple[int | None, int | None], tuple[float, float]] = {}

    def add(self, *, is_right: bool, confidence: float | None = None) -> None:
        row = self.num_right.bit_length()
        keys: list[tuple[int | None, int | None]] = [(row, None)]
        if confidence is not None:
            bucket = bisect(CONFIDENCES, confidence)
            keys += [(None, bucket), (row, bucket)]
        for key in keys:
            right, every = self._counts.get(key, (0.0, 0.0))
            if every >= MEMORY:
                right, every = right / 2, every / 2
            self._counts[key] = right + is_right, every + 1
        self.num_right = self.num_right + 1 if is_right else 0

    def at(self, num_right: int, confidence: float | None = None) -> float:
        row, prior = num_right.bit_length(), (num_right + 1) / (num_right + 3)
        if confidence is None:
            return self._counted(row, None, prior)
        bucket, prior = bisect(CONFIDENCES, confidence), (prior + confidence) / 2
        either = self._counted(row, None, prior) + self._counted(None, bucket, prior)
        return self._counted(row, bucket, either / 2)

    def _counted(self, row: int | None, bucket: int | None, prior: float) -> float:
        right, every = self._counts.get((row, bucket), (0.0, 0.0))
        return (right + PRIOR * prior) / (every + PRIOR)

    def accepted(self, num_drafted: int, confidences: Sequence[float] = ()) -> list[float]:
        """(K,): of the first 1, 2, ... drafted tokens, how many are expected to be accepted."""
        expected, share, totals = 0.0, 1.0, list[float]()
        for place in range(num_drafted):
            share *= self.at(self.num_right + place, _at(confidences, place))
            expected += share
            totals.append(expected)
        return totals


def _at(confidences: Sequence[float], place: int) -> float | None:
    """None of a drafter that has none."""
    return confidences[place] if place < len(confidences) else None


class DraftLengthController:
    """Of one sample. most: drafted tokens of a round. rows: tokens that a verification computes, of
    a prompt and a draft of so many. opened_rows: tokens that opening a stream computes.

    A draft is verified as far as the tokens that are expected of it save most: the time in which
    the target would stream them, less that of the verification, and of opening its stream again
    where one has to be closed for it. Where that is too little the target streams on, and the draft
    is compared with what it samples, so that the acceptance is known without a verification.
    """

    def __init__(
        self,
        most: int,
        costs: RoundCosts,
        rows: Callable[[int, int], int],
        opened_rows: Callable[[int], int],
    ):
        self.rate = AcceptanceRate()
        self._most = most
        self._costs = costs
        self._rows = rows
        self._opened_rows = opened_rows
        self._draft = NO_DRAFT
        self._num_compared = 0  # of its tokens, all where it has been told wrong
        self._wait = FIRST_ASKED
        self._num_unasked = 0

    def asked(self, num_prompt: int, left: int, *, is_streaming: bool) -> int:
        """Tokens that drafters are to be asked for now. left: that the sample may still get."""
        most = min(self._most, left - 1)
        if most < 1:
            return 0
        drafting_s, token_s = self._costs.drafted.at(most), self._costs.token.seconds
        if not drafting_s > FREE * token_s:  # nor where one of them is not known
            return most
        lengths = sorted({most, *(1 << power for power in range(most.bit_length()))})
        savings = self._savings(num_prompt, lengths, is_streaming=is_streaming)
        net = {
            num: saved - self._costs.drafted.at(num)
            for num, saved in zip(lengths, savings, strict=True)
        }
        best = max(lengths, key=net.__getitem__)
        if net[best] > 0 or self._num_unasked >= self._wait:
            return best
        return 0

    def verified(self, num_prompt: int, num_drafted: int, *, is_streaming: bool) -> int:
        """How many tokens of a draft are to be verified now; 0: the target samples on."""
        if not num_drafted or not self._costs.are_known:
            return num_drafted
        lengths = range(1, num_drafted + 1)
        savings = self._savings(
            num_prompt, lengths, self._draft.confidences, is_streaming=is_streaming
        )
        best = max(range(num_drafted), key=savings.__getitem__)
        if savings[best] > 0:
            return best + 1
        cost_s = self._cost_s(num_prompt, best + 1, is_streaming=is_streaming)
        is_affordable = cost_s < LOOK_AGAIN * self._costs.unverified_s
        return best + 1 if is_affordable and savings[best] > -cost_s / 2 else 0

    def was_drafted(self, draft: Draft) -> None:
        self._draft, self._num_compared = draft, 0
        self._num_unasked = 0

    def was_sampled(self, tokens: Sequence[int]) -> None:
        """By the target itself."""
        self._num_unasked += len(tokens)
        for token in tokens:
            if self._num_compared >= len(self._draft.tokens):
                return
            self._compare(is_right=self._draft.tokens[self._num_compared] == token)

    def was_verified(self, num_drafted: int, num_accepted: int) -> None:
        self._num_unasked = 0
        for _ in range(num_accepted):
            self._compare(is_right=True)
        if num_accepted < num_drafted:
            self._compare(is_right=False)
        self._draft = NO_DRAFT

    def _compare(self, *, is_right: bool) -> None:
        """The draft's next token."""
        place, confidences = self._num_compared, self._draft.confidences
        self._num_compared = place + 1 if is_right else len(self._draft.tokens)
        is_miss = not is_right and not self.rate.num_right
        self._wait = min(2 * self._wait, MOST_WAITED) if is_miss else FIRST_ASKED
        self.rate.add(is_right=is_right, confidence=_at(confidences, place))

    def _savings(
        self,
        num_prompt: int,
        lengths: Sequence[int],
        confidences: Sequence[float] = (),
        *,
        is_streaming: bool,
    ) -> list[float]:
        """Seconds, where so many tokens are verified, ascending; one of the target's own comes with
        them."""
        token_s, accepted = self._costs.token.seconds, self.rate.accepted(lengths[-1], confidences)
        return [
            (accepted[num - 1] + 1) * token_s
            - self._cost_s(num_prompt, num, is_streaming=is_streaming)
            for num in lengths
        ]

    def _cost_s(self, num_prompt: int, num_drafted: int, *, is_streaming: bool) -> float:
        rows = self._rows(num_prompt, num_drafted)
        cost_s = self._costs.verified.at(rows) + self._costs.repeated_s
        opened_s = self._costs.opened.at(self._opened_rows(num_prompt + num_drafted))
        stream_s = sum(s for s in (opened_s, self._costs.closed.at(1)) if not math.isnan(s))
        if is_streaming:
            return MARGIN * (cost_s + STREAM_SHARE * stream_s)
        return max(cost_s - STREAM_SHARE * stream_s, LEAST_SHARE * cost_s)
