"""What every drafter does: it reads samples as they are written and proposes how they go on.

The target draws the token of each position as it does without drafts, and a drafted token stands
if it is that token. So a drafter changes speed only, never what is written.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tinkercloud.core.types import SamplingParams
from tinkercloud.speculative.drafters.draft_distribution import DraftLaw


@dataclass(frozen=True, slots=True)
class Stream:
    """One sample being written.

    id: unique in the engine. group: equal for samples of the same prompt that may learn from one
    another, across epochs too. version: of the policy's weights; epoch: the versions published
    before it. tokens: the prompt and what was emitted so far; the engine appends, drafters only
    read. params, sample_index: what the target draws with.
    """

    id: int
    group: Hashable
    version: str
    epoch: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    sample_index: int


@dataclass(frozen=True, slots=True)
class Draft:
    """A chain of tokens, shorter than asked or empty where the drafter has no more to say.

    confidences: of each token, the drafter's own estimate in 0..1 that it stands if those before
    it do; not calibrated. laws: what each token was drawn from, where a coupled drafter tells it
    (`AuditSchedule`); () else.
    """

    tokens: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    laws: tuple[DraftLaw, ...] = ()


NOTHING = Draft()


class Drafter(Protocol):
    """Calls come from one thread: `begin` once, then `observe` and `propose`, then `end` once.

    is_coupled: it draws with the target's own noise, so that its tokens stand more often than their
    probability says; it is audited by the laws that it tells. layers: of the target, whose outputs
    it wants to see.
    """

    is_coupled: bool

    @property
    def name(self) -> str: ...

    @property
    def layers(self) -> tuple[int, ...]: ...

    def begin(self, stream: Stream) -> None: ...

    def observe(self, stream: Stream, num_new: int) -> None:
        """The last `num_new` of the stream's tokens are new."""
        ...

    def see(self, stream: Stream, first: int, hidden: Tensor) -> None:
        """hidden (n, L, D): what `layers` put out at the sample's tokens from place `first` on, all
        of which stand; comes before `observe` of the tokens after them."""
        ...

    def end(self, stream: Stream) -> None:
        """The sample is finished or dropped."""
        ...

    def propose(self, asked: Sequence[tuple[Stream, int]]) -> list[Draft]:
        """A draft for each stream, in order, of at most as many tokens as stand beside it."""
        ...


class SilentDrafter:
    """Never drafts; drafters that remember nothing are made from it."""

    is_coupled = False

    @property
    def name(self) -> str:
        return "off"

    @property
    def layers(self) -> tuple[int, ...]:
        return ()

    def see(self, stream: Stream, first: int, hidden: Tensor) -> None:
        pass

    def begin(self, stream: Stream) -> None:
        pass

    def observe(self, stream: Stream, num_new: int) -> None:
        pass

    def end(self, stream: Stream) -> None:
        pass

    def propose(self, asked: Sequence[tuple[Stream, int]]) -> list[Draft]:
        return [NOTHING for _ in asked]
