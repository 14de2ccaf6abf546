"""What every drafter does: it reads samples as they are written and proposes how they go on.

The target draws the token of each position as it does without drafts, and a drafted token is
accepted if it is that token (`verify.match`). So a drafter changes speed only, never the output.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinkercloud.core.types import SamplingParams

if TYPE_CHECKING:  # whoever drafts elsewhere needs no torch here
    from torch import Tensor

    from tinkercloud.speculative.drafters.draft_distribution import DraftDistribution


@dataclass(frozen=True, slots=True)
class Stream:
    """One sample being written.

    id: unique in the engine. group: equal for samples of the same prompt that may learn from one
    another, across epochs too. version: of the policy's weights; epoch: the versions published
    before it. tokens: the prompt and what was emitted so far; the engine appends, drafters only
    read. params, sample_index: what the target draws with. salt: of those samples that may share
    what was computed for a beginning that they have in common.
    """

    id: int
    group: Hashable
    version: str
    epoch: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    sample_index: int
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Draft:
    """A chain of tokens, shorter than asked or empty where the drafter has no more to say.

    confidences: of each token, the drafter's own estimate in 0..1 that it is accepted if those
    before it are; not calibrated. distributions: what each token was drawn from, where a coupled
    drafter reports it (`AuditSchedule`); () else. seconds: in place of each token, what the drafter
    takes for the likeliest where it is rejected; () where it does not say.
    """

    tokens: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    distributions: "tuple[DraftDistribution, ...]" = ()
    seconds: tuple[int, ...] = ()


NO_DRAFT = Draft()


class Drafter:
    """The contract, and a drafter that never drafts: others override what they need.

    Calls come from one thread: for each stream `begin` once, then `observe`, `observe_hidden`,
    `catch_up` and `propose`, then `end` once. is_coupled: it draws with the target's own noise, so
    that its tokens are accepted more often than their probability says; it is audited by the
    distributions that it reports. layers: of the target, whose outputs it reads. unsure_below: set
    before `propose`: nobody verifies what is drafted behind a token of less confidence, so that it
    may be the last of its draft.
    """

    name: str = "off"
    is_coupled: bool = False
    layers: tuple[int, ...] = ()
    unsure_below: float = 0.0

    def begin(self, stream: Stream) -> None:
        """A sample with its prompt, or with all tokens that it has where it was interrupted."""

    def observe(self, stream: Stream, num_new: int) -> None:
        """The last `num_new` of the stream's tokens are new."""

    def observe_hidden(self, stream: Stream, first: int, hidden: "Tensor") -> None:
        """hidden (n, L, D): what `layers` put out at the sample's tokens from place `first` on, all
        of them accepted; comes before `observe` of the tokens after them."""

    def end(self, stream: Stream) -> None:
        """The sample is finished or dropped."""

    def catch_up(self, streams: Sequence[Stream]) -> None:
        """Before `propose` of these: reads, but for the last of them, the tokens of rounds that did
        not ask for a draft. What this takes is not the time of a draft, and would look like it."""

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        """A draft for each stream, in order, of at most as many tokens as its pair says."""
        return [NO_DRAFT] * len(requests)

    def propose_after(
        self, requests: Sequence[tuple[Stream, Sequence[int], int]], is_stale: Callable[[], bool]
    ) -> list[Draft] | None:
        """As `propose`, were the tokens of each request the stream's next ones; for when there is
        time before the target has drawn them. A stream may be in several requests. is_stale: is
        asked between two steps, and where it is true the answer is None."""
        return [NO_DRAFT] * len(requests)

    def forget_ended(self, before_s: float) -> None:
        """What is kept of samples for those that begin as they did is dropped where it was used
        last before that time (`time.monotonic`)."""

    def snapshot(self) -> Mapping[str, Any]:
        """Counters of its own, for those who operate it; empty where it has none."""
        return {}
