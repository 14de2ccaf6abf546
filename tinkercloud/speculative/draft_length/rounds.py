"""One round of speculative decoding, as it is planned and as it went: propose, verify, accept.

Axes: B sequences, K drafted tokens of one sequence.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """WARM_UP: with a new drafter. PROBE: a few drafts, while off. COMPARISON: none, while on."""

    PLAIN = "plain"
    SPECULATIVE = "speculative"
    WARM_UP = "first"
    PROBE = "probe"
    COMPARISON = "comparison"


class Reason(StrEnum):
    """Why a round had no drafts."""

    NONE = ""
    OFF = "drafter off"
    ALARM = "alarm"
    UNWANTED = "not wanted by the sessions"
    TOO_MANY = "too many sequences"
    ACCEPTANCE = "acceptance too low"
    DRAFTER = "drafter too slow"
    BEHIND = "slower than plain"
    COMPARING = "comparing with plain"
    EMPTY = "nothing drafted"


@dataclass(frozen=True, slots=True)
class Load:
    """A sequence that waits for its next token.

    context: tokens so far. remaining: how many more are predicted, in any unit that all loads
    share. num_living: unfinished samples of its group, itself included. speculates: False where
    its session wants no drafts.
    """

    context: int
    group: Hashable = None
    remaining: float = 0.0
    num_living: int = 1
    speculates: bool = True


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds. verify: the target's forward and its draws; host: all else but drafting.
    catch_up: what the drafter took to read tokens of rounds in which it was not asked.

    usable: False where other work, a prefill for example, shared the forward.
    """

    draft_ms: float
    verify_ms: float
    host_ms: float = 0.0
    usable: bool = True
    catch_up_ms: float = 0.0

    @property
    def target_ms(self) -> float:
        return self.verify_ms + self.host_ms

    @property
    def steady_ms(self) -> float:
        """As when every round drafts."""
        return self.draft_ms + self.verify_ms + self.host_ms

    @property
    def all_ms(self) -> float:
        return self.steady_ms + self.catch_up_ms


@dataclass(frozen=True, slots=True)
class Round:
    """What happened; every tuple has B entries, in the order of the loads.

    limits: tokens asked of the drafter, at most. confidences: of the tokens that it proposed.
    verified: how many of those the target saw. accepted: how many of these were accepted.
    context: mean over the sequences. ended: whether its sample ended with a drafted token, so that
    the target added none and what was drafted after it was not judged; () where none did. foreseen:
    whether the token that the target added is the one that was drafted in its place, behind those
    that were verified; None where none was, () where that is so of all. unsure_below: as of
    `Drafter`.
    """

    limits: tuple[int, ...]
    confidences: tuple[tuple[float, ...], ...]
    verified: tuple[int, ...]
    accepted: tuple[int, ...]
    times: Times
    context: float = 0.0
    groups: tuple[Hashable, ...] = ()
    ended: tuple[bool, ...] = ()
    foreseen: tuple[bool | None, ...] = ()
    unsure_below: float = 0.0

    @property
    def num_sequences(self) -> int:
        return len(self.limits)

    @property
    def num_verified(self) -> int:
        return sum(self.verified)

    @property
    def num_rows(self) -> int:
        """Of the target's forward."""
        return self.num_sequences + self.num_verified

    @property
    def num_emitted(self) -> int:
        return self.num_sequences + sum(self.accepted) - sum(self.ended)

    @property
    def num_judged(self) -> tuple[int, ...]:
        """Drafted tokens with a verdict: those accepted, and the first that was rejected."""
        ended = self.ended or (False,) * self.num_sequences
        judged = zip(self.verified, self.accepted, ended, strict=True)
        return tuple(min(v, a + 1 - e) for v, a, e in judged)

    @property
    def num_compared(self) -> tuple[int, ...]:
        """Drafted tokens of which it is known whether they were right: those with a verdict, and
        the one in whose place the target's own is, though nobody verified it."""
        known = zip(self.num_judged, self._foreseen, strict=True)
        return tuple(judged + (each is not None) for judged, each in known)

    @property
    def num_right(self) -> tuple[int, ...]:
        known = zip(self.accepted, self._foreseen, strict=True)
        return tuple(accepted + bool(each) for accepted, each in known)

    @property
    def _foreseen(self) -> tuple[bool | None, ...]:
        return self.foreseen or (None,) * self.num_sequences
