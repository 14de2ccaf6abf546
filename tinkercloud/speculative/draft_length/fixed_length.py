"""A policy that drafts the same in every round, for those who want to see drafts, not speed."""

from collections.abc import Sequence
from typing import Protocol

from tinkercloud.speculative.draft_length.rounds import Kind, Load, Reason, Round


class DraftLength(Protocol):
    """What decides how much is drafted: `policy.Policy`, or something simpler."""

    @property
    def kind(self) -> Kind: ...

    @property
    def reason(self) -> Reason: ...

    @property
    def is_on(self) -> bool: ...

    def limits(self, loads: Sequence[Load]) -> list[int]: ...

    def choose(self, confidences: Sequence[Sequence[float]]) -> list[int]: ...

    def observe(self, last_round: Round) -> None: ...

    def renew(self) -> None: ...

    def stop(self, reason: Reason) -> None: ...


class FixedLength:
    """Asks for `most` tokens of every sample, and has all verified that come."""

    kind = Kind.SPECULATIVE
    reason = Reason.NONE
    is_on = True

    def __init__(self, most: int):
        self._most = most

    def limits(self, loads: Sequence[Load]) -> list[int]:
        return [self._most if load.speculates else 0 for load in loads]

    def choose(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        return [len(own) for own in confidences]

    def observe(self, last_round: Round) -> None:
        """It learns nothing."""

    def renew(self) -> None:
        """It knows nothing."""

    def stop(self, reason: Reason) -> None:
        """It goes on: what is watched here is what an alarm would be about."""
