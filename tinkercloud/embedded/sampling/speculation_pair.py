"""Two drafters for the samples of one base model: the second drafts in rounds that the first lets
pass, because what it would draft has not paid recently.

Both have a draft-length controller of their own, and see every token. A round has drafts of one of
them, so that its time is that of one.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tinkercloud.decoding.sampler import Drawn
from tinkercloud.embedded.sampling.sequences import Sequence as Sample
from tinkercloud.embedded.sampling.speculation import Speculation
from tinkercloud.embedded.sampling.speculator import Speculator


class SpeculationPair(Speculator):
    """is_ready: whether the second has something to draft with; until then rounds that pass are
    plain."""

    def __init__(self, first: Speculation, second: Speculation, is_ready: Callable[[], bool]):
        self._first, self._second, self._is_ready = first, second, is_ready
        second.report_with(first)

    @property
    def layers(self) -> tuple[int, ...]:
        return self._second.layers if self._is_ready() else ()

    def reads_distributions(self, sample: Sample) -> bool:
        return self._first.reads_distributions(sample) or self._second.reads_distributions(sample)

    def begin(self, sample: Sample) -> None:
        self._first.begin(sample)
        self._second.begin(sample)

    def observe_hidden(self, sample: Sample, first: int, hidden: Tensor) -> None:
        self._second.observe_hidden(sample, first, hidden)

    def observe(self, sample: Sample, num_new: int) -> None:
        self._first.observe(sample, num_new)
        self._second.observe(sample, num_new)

    def end(self, sample: Sample) -> None:
        self._first.end(sample)
        self._second.end(sample)

    def end_all(self) -> None:
        self._first.end_all()
        self._second.end_all()

    def forget(self, version_id: str) -> None:
        self._first.forget(version_id)
        self._second.forget(version_id)

    def propose(self, samples: Sequence[Sample]) -> list[tuple[int, ...]]:
        drafts = self._first.propose(samples)
        if self._first.is_skipping and self._is_ready():
            return self._second.propose(samples)
        return drafts

    def drop_draft(self, sample: Sample) -> None:
        self._first.drop_draft(sample)
        self._second.drop_draft(sample)

    def record_verdict(
        self, sample: Sample, num_new: int, drawn: Drawn, rows: Sequence[int]
    ) -> None:
        """For whoever has proposed."""
        self._first.record_verdict(sample, num_new, drawn, rows)
        self._second.record_verdict(sample, num_new, drawn, rows)

    def end_round(self, all_ms: float, *, usable: bool) -> None:
        self._first.end_round(all_ms, usable=usable)
        self._second.end_round(all_ms, usable=usable)

    def snapshot(self) -> dict[str, Any]:
        """Counters of both together; what the second decided by itself is under its name."""
        second = self._second.snapshot()
        decisions = {name: second[name] for name in ("on", "reason", "refused", "drafter_off")}
        return {**self._first.snapshot(), "second": decisions}

    def lines(self) -> list[str]:
        return self._first.lines()
