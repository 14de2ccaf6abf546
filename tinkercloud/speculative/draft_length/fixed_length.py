"""What decides how much is drafted, and the simplest such thing: the same in every round."""

from collections.abc import Sequence
from typing import Protocol

from tinkercloud.speculative.draft_length.rounds import Kind, Load, Reason, Round


class DraftLength(Protocol):
    """In each round `limits` comes before drafting, `choose` after it and `observe` last. kind and
    reason are those of the last `limits`."""

    kind: Kind
    reason: Reason
    is_on: bool
    unsure_below: float
    """See `Drafter`; of the last `limits`."""

    def limits(self, loads: Sequence[Load]) -> list[int]:
        """Tokens to ask the drafter for, at most, of each sequence; 0: not to ask."""
        ...

    def choose(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        """How many tokens of each draft to verify; of the sequences of the last `limits`."""
        ...

    def observe(self, last_round: Round) -> None:
        """The round of the last `limits` is over."""

    def skipped(self, ms: float, num_sequences: int, *, usable: bool) -> None:
        """A round of so many took `ms` for which `limits` was not asked; nothing was drafted in it.
        usable: as of `Times`."""

    def renew(self, expected: Sequence[float] = ()) -> None:
        """New weights, or a new draft: what was learned is worth less. expected: acceptance by
        depth of a new draft, as far as it is known."""

    def stop(self, reason: Reason) -> None:
        """No drafts from here on."""


class FixedLength(DraftLength):
    """Asks for `most` tokens of every sample, and has all of them verified: for those who want to
    see drafts, not speed. It learns nothing, and an alarm does not stop it."""

    kind = Kind.SPECULATIVE
    reason = Reason.NONE
    is_on = True
    unsure_below = 0.0

    def __init__(self, most: int):
        self._most = most

    def limits(self, loads: Sequence[Load]) -> list[int]:
        return [self._most if load.speculates else 0 for load in loads]

    def choose(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        return [len(draft) for draft in confidences]
