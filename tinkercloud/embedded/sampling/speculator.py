"""What drafts for the samples of one base model, as the engine calls it."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from tinkercloud.decoding.sampler import Drawn
from tinkercloud.embedded.sampling.sequences import Sequence as Sample


class Speculator(Protocol):
    """In each round: `propose` with the samples that wait for a token, `record_verdict` for each of
    them once the target's tokens are drawn, `end_round` with the time that it took."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Of the target, whose outputs the next rounds' drafts read."""
        ...

    def reads_distributions(self, sample: Sample) -> bool:
        """Whether verdicts on its drafts read whole distributions, and not the chances of drafted
        tokens alone."""
        ...

    def begin(self, sample: Sample) -> None:
        """With its first token, or with all its tokens where it was pre-empted."""
        ...

    def observe_hidden(self, sample: Sample, first: int, hidden: Tensor) -> None:
        """hidden (n, L, D) of the tokens from place `first` on; comes before `observe` of the token
        after the last of them."""
        ...

    def observe(self, sample: Sample, num_new: int) -> None:
        """The last `num_new` of the sample's tokens are new."""
        ...

    def end(self, sample: Sample) -> None:
        """It is finished, was dropped, or starts over."""
        ...

    def end_all(self) -> None: ...

    def forget(self, version_id: str) -> None:
        """Nothing of this version is to be kept any more."""
        ...

    def propose(self, samples: Sequence[Sample]) -> list[tuple[int, ...]]:
        """Drafted tokens for each sample, to be verified."""
        ...

    def drop_draft(self, sample: Sample) -> None:
        """There are no blocks for its draft, which is not verified."""
        ...

    def record_verdict(
        self, sample: Sample, num_new: int, drawn: Drawn, rows: Sequence[int]
    ) -> None:
        """num_new: the sample's tokens of this round. rows: those of `drawn` that its draft was
        verified with, and the one after."""
        ...

    def end_round(self, all_ms: float, *, usable: bool) -> None:
        """all_ms: the round's time, drafting included. usable: nothing else was computed in it."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Counters, for JSON."""
        ...

    def lines(self) -> list[str]:
        """The same in Prometheus' text format."""
        ...
