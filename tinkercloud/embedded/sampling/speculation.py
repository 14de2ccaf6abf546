"""Speculative decoding for the samples of one base model: drafts, verdicts, and who learns of them.

Nothing here can change a token: a drafted token is accepted where the target draws the same token
anyway.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import nan
from typing import Any, Protocol

from torch import Tensor

from tinkercloud.decoding.sampler import Drawn
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.detailed_log import DetailedLog, Verdict
from tinkercloud.embedded.sampling.sequences import Sequence as Sample
from tinkercloud.embedded.sampling.speculator import Speculator
from tinkercloud.embedded.sampling.trace import Trace, TracedDraft
from tinkercloud.speculative.draft_length.fixed_length import DraftLength
from tinkercloud.speculative.draft_length.rounds import Kind, Load, Reason, Round, Times
from tinkercloud.speculative.drafters.draft_distribution import DraftDistribution
from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft, Stream
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter
from tinkercloud.speculative.learning.collecting import JudgedToken
from tinkercloud.speculative.observability.prometheus import remote_lines
from tinkercloud.speculative.observability.telemetry import RoundReport, Telemetry
from tinkercloud.speculative.verify import coupled_chance

MAX_SKIPPED, MAX_SKIPPED_OF_MANY, MANY = 7, 15, 8
"""Rounds without a decision: MAX_SKIPPED after one in which the controller allowed no draft, and 1,
3 or at most as many where drafts cost nothing but none was worth verifying; each round with an
accepted token takes back one such step, the first sample of new weights all of them. To decide the
same again in every round would be most of what drafts cost. One text may begin to repeat itself
soon; of MANY samples the mean stays, and a decision costs more."""
MAX_DRAWS = 65_536
"""Draws that are remembered (see `_DrawHistory`)."""


class DraftObserver(Protocol):
    """Is notified of verdicts, to learn from them. category: the model whose samples they were
    for."""

    @property
    def version_lag(self) -> int:
        """Steps of the RL policy since the draft in use was trained."""
        ...

    @property
    def reads_distributions(self) -> bool:
        """Of judged tokens; else it never calls `JudgedToken.distribution`."""
        ...

    def drafted(self, category: str, num_judged: int, num_accepted: int) -> None:
        """In one round. Judged tokens are the accepted ones, and of each draft the first that was
        rejected."""
        ...

    def judged(self, stream: Stream, token: JudgedToken, category: str) -> None: ...

    def ended(self, stream: Stream, version: Version) -> None: ...

    def forget(self, version_id: str) -> None:
        """Nothing of this version is to be kept any more."""


@dataclass(slots=True)
class _SampleRound:
    """A sample in the current round. limit: tokens that were asked of the drafter; num_verified: of
    the draft, what the target sees. foreseen: as of `Round`."""

    sample: Sample
    group: Hashable
    limit: int
    draft: Draft
    num_verified: int
    num_accepted: int = 0
    ended: bool = False
    foreseen: bool | None = None
    chances: tuple[float, ...] = ()
    is_judged: bool = False


class Speculation(Speculator):
    """By one drafter, whose view of every sample it owns. One round at a time."""

    def __init__(
        self,
        drafter: GuardedDrafter,
        controller: DraftLength,
        trace: Trace | None = None,
        observer: DraftObserver | None = None,
        details: DetailedLog | None = None,
    ):
        self._drafter, self._controller = drafter, controller
        self._trace, self._details = trace, details
        self._observer = observer
        self._telemetry = Telemetry()
        self._is_stopped = False
        self._streams: dict[Sample, Stream] = {}
        self._num_unfinished: Counter[Hashable] = Counter()  # samples, by group
        self._epochs: dict[str, int] = {}  # of versions, in the order of their first sample
        self._num_versions = 0
        self._num_streams = 0
        self._draws = _DrawHistory()
        self._repeated: set[Sample] = set()
        self._round: dict[Sample, _SampleRound] = {}
        self._catch_up_ms = self._draft_ms = self._host_ms = 0.0
        self._num_to_skip = self._num_idle = 0  # rounds
        self.is_skipping = False  # this round
        self._num_skipping = 0  # samples, in the last such round
        self._num_read: dict[Sample, int] = {}  # tokens that the drafter has observed

    # ---- samples begin, grow and end

    def begin(self, sample: Sample) -> None:
        job, group = sample.job, _group(sample)
        stream = Stream(
            self._num_streams, group, job.version.id, self._epoch(job.version), sample.tokens,
            job.num_prompt, job.request.params, sample.index, job.request.cache_salt,
        )  # fmt: skip
        self._num_streams += 1
        self._streams[sample] = stream
        self._num_unfinished[group] += 1
        if self._draws.add(stream):
            self._repeated.add(sample)
        self._drafter.begin(stream)
        self._num_read[sample] = len(sample.tokens)

    @property
    def layers(self) -> tuple[int, ...]:
        return self._drafter.layers

    def reads_distributions(self, sample: Sample) -> bool:
        is_detailed = self._details_of(sample) is not None
        learns = self._observer is not None and self._observer.reads_distributions
        return self._drafter.is_coupled or is_detailed or learns

    def _details_of(self, sample: Sample) -> DetailedLog | None:
        """Where its verdicts are written to, if it asks for them."""
        return self._details if sample.job.request.details_for else None

    def observe_hidden(self, sample: Sample, first: int, hidden: Tensor) -> None:
        self._drafter.observe_hidden(self._streams[sample], first, hidden)

    def observe(self, sample: Sample, num_new: int) -> None:
        # While rounds are skipped the drafter is not called: that costs as much as a short draft.
        if not self._num_to_skip:
            self._pass_on(sample)

    def _pass_on(self, sample: Sample) -> None:
        num = len(sample.tokens)
        num_new, self._num_read[sample] = num - self._num_read[sample], num
        if num_new:
            self._drafter.observe(self._streams[sample], num_new)

    def end(self, sample: Sample) -> None:
        if sample not in self._streams:
            return
        self._pass_on(sample)
        del self._num_read[sample]
        stream = self._streams.pop(sample)
        self._repeated.discard(sample)
        if sample in self._round and not self._round[sample].is_judged:
            del self._round[sample]
        self._num_unfinished[stream.group] -= 1
        if not self._num_unfinished[stream.group]:
            del self._num_unfinished[stream.group]
        self._drafter.end(stream)
        if self._details is not None:
            self._details.ended(sample)
        if self._observer is not None:
            self._observer.ended(stream, sample.job.version)

    def renew(self, expected: Sequence[float] = ()) -> None:
        """The drafter has other weights: what was counted of it has less weight. expected: what
        takes its place, acceptance by depth."""
        self._num_to_skip = self._num_idle = 0
        self._controller.renew(expected)

    def report_with(self, other: "Speculation") -> None:
        self._telemetry = other._telemetry  # their rounds are counted together

    def end_all(self) -> None:
        for sample in list(self._streams):
            self.end(sample)

    def forget(self, version_id: str) -> None:
        self._epochs.pop(version_id, None)
        if self._observer is not None:
            self._observer.forget(version_id)

    # ---- a round

    def propose(self, samples: Sequence[Sample]) -> list[tuple[int, ...]]:
        self.is_skipping = self._num_to_skip > 0
        if self.is_skipping:
            self._num_to_skip -= 1
            self._num_skipping = len(samples)
            return [()] * len(samples)
        start = time.perf_counter()
        most_skipped = MAX_SKIPPED if len(samples) < MANY else MAX_SKIPPED_OF_MANY
        for sample in self._streams:
            self._pass_on(sample)
        limits = self._controller.limits([self._load(sample) for sample in samples])
        if self._controller.kind is not Kind.COMPARISON and not any(limits):
            self._num_to_skip = most_skipped
        limits = [
            # The target adds a token itself, so that one place fewer is left for the draft.
            min(limit, sample.num_left - 1) if sample.job.takes_drafts else 0
            for sample, limit in zip(samples, limits, strict=True)
        ]
        drafts = self._drafts(samples, limits)
        nums_verified = self._controller.choose([draft.confidences for draft in drafts])
        if self._controller.kind is not Kind.COMPARISON and not any(nums_verified):
            self._num_idle = min(2 * self._num_idle + 1, most_skipped)
            self._num_to_skip = max(self._num_to_skip, self._num_idle)
        self._round = {
            sample: _SampleRound(
                sample, self._streams[sample].group, limit, draft, min(num, len(draft.tokens))
            )
            for sample, limit, draft, num in zip(
                samples, limits, drafts, nums_verified, strict=True
            )
        }
        drafting_ms = self._draft_ms + self._catch_up_ms
        self._host_ms = 1e3 * (time.perf_counter() - start) - drafting_ms
        return [each.draft.tokens[: each.num_verified] for each in self._round.values()]

    def _drafts(self, samples: Sequence[Sample], limits: Sequence[int]) -> Sequence[Draft]:
        """By the drafter; notes its times."""
        self._catch_up_ms = self._draft_ms = 0.0
        if not any(limits):
            return [NO_DRAFT] * len(samples)
        start = time.perf_counter()
        streams = [self._streams[sample] for sample in samples]
        self._drafter.catch_up([s for s, limit in zip(streams, limits, strict=True) if limit])
        caught_up = time.perf_counter()
        requests = list(zip(streams, limits, strict=True))
        drafts = self._drafter.propose(requests, self._controller.unsure_below)
        self._catch_up_ms = 1e3 * (caught_up - start)
        self._draft_ms = 1e3 * (time.perf_counter() - caught_up)
        return drafts

    def drop_draft(self, sample: Sample) -> None:
        if sample in self._round:
            self._round[sample].num_verified = 0

    def record_verdict(
        self, sample: Sample, num_new: int, drawn: Drawn, rows: Sequence[int]
    ) -> None:
        entry = self._round.get(sample)
        if entry is None:
            return
        num_judged = min(entry.num_verified, num_new)
        last = entry.draft.tokens[num_new - 1] if num_judged == num_new else None
        entry.ended = last == sample.tokens[-1]  # an accepted token is a stop: none comes after it
        entry.num_accepted, entry.is_judged = num_new - 1 + entry.ended, True
        if entry.num_accepted == entry.num_verified < len(entry.draft.tokens) and not entry.ended:
            entry.foreseen = entry.draft.tokens[entry.num_verified] == sample.tokens[-1]
        if not num_judged:
            return
        if sample not in self._repeated:
            entry.chances = self._chances(entry.draft, drawn, rows[:num_judged])
        at = num_judged - 1  # the rejected token, or the last accepted one
        position = len(sample.tokens) - num_new + at

        def distribution() -> Tensor:
            return drawn.distribution(rows[at]).exp()

        details = self._details_of(sample)
        if details is not None:
            verdict = Verdict(entry.draft, num_judged, entry.num_accepted, position, distribution)
            details.judged(sample, verdict)
        if self._observer is not None:
            drafted, target = entry.draft.tokens[at], sample.tokens[position]
            token = JudgedToken(position, drafted, target, distribution)
            category = sample.job.version.origin
            self._observer.judged(self._streams[sample], token, category)

    def _chances(self, draft: Draft, drawn: Drawn, rows: Sequence[int]) -> tuple[float, ...]:
        """Of each judged token to be accepted; () where the draft is not audited."""
        if not self._drafter.is_coupled:
            return drawn.chances(rows, draft.tokens)
        return tuple(
            _coupled(drawn, row, token, distribution)
            for row, token, distribution in zip(
                rows, draft.tokens, draft.distributions, strict=False
            )
        )

    def end_round(self, all_ms: float, *, usable: bool) -> None:
        if self.is_skipping:
            self.is_skipping = False
            self._controller.skipped(all_ms, self._num_skipping, usable=usable)
            return
        entries, self._round = list(self._round.values()), {}
        if not entries:
            return
        own_ms = self._catch_up_ms + self._draft_ms + self._host_ms
        verify_ms = max(0.0, all_ms - own_ms)
        times = Times(self._draft_ms, verify_ms, self._host_ms, usable, self._catch_up_ms)
        last_round = _round_of(entries, times, self._controller.unsure_below)
        if any(last_round.accepted):
            self._num_idle //= 2
        self._controller.observe(last_round)
        self._notify_observer(entries, last_round)
        self._report(entries, last_round)
        if self._trace is not None:
            drafts = [
                TracedDraft(e.sample, e.draft, e.num_verified, e.num_accepted, e.ended)
                for e in entries
                if e.num_verified
            ]
            self._trace.round(self._drafter.name, str(self._controller.kind), drafts, times)

    def _report(self, entries: Sequence[_SampleRound], last_round: Round) -> None:
        """To telemetry, whose alarm ends speculation, as a drafter that is off does."""
        chances = tuple(entry.chances for entry in entries)
        lag = self._observer.version_lag if self._observer is not None else 0
        kind, reason = self._controller.kind, self._controller.reason
        report = RoundReport(self._drafter.name, kind, reason, last_round, chances, lag)
        self._telemetry.record(report)
        is_alarmed = self._telemetry.is_alarmed(report.drafter)
        if not self._is_stopped and (is_alarmed or self._drafter.off_reason is not None):
            self._controller.stop(Reason.ALARM if is_alarmed else Reason.OFF)
            self._is_stopped = True

    def _notify_observer(self, entries: Sequence[_SampleRound], last_round: Round) -> None:
        if self._observer is None or not last_round.num_verified:
            return
        judged, accepted = Counter[str](), Counter[str]()
        for entry, num_judged in zip(entries, last_round.num_judged, strict=True):
            category = entry.sample.job.version.origin
            judged[category] += num_judged
            accepted[category] += entry.num_accepted
        for category, num_judged in judged.items():
            self._observer.drafted(category, num_judged, accepted[category])

    # ---- counters

    def snapshot(self) -> dict[str, Any]:
        refused = dict(self._drafter.num_refused)
        return {
            **self._telemetry.snapshot(),
            "on": self._controller.is_on,
            "reason": str(self._controller.reason),
            "refused": refused,
            "drafter_off": self._drafter.off_reason,
            "drafter": dict(self._drafter.snapshot()),
        }

    def lines(self) -> list[str]:
        return self._telemetry.lines() + remote_lines(self._drafter.snapshot())

    # ----

    def _load(self, sample: Sample) -> Load:
        group = self._streams[sample].group
        num_unfinished, speculates = self._num_unfinished[group], sample.job.takes_drafts
        return Load(len(sample.tokens), group, sample.num_left, num_unfinished, speculates)

    def _epoch(self, version: Version) -> int:
        if version.id not in self._epochs:
            self._epochs[version.id] = self._num_versions
            self._num_versions += 1
            if self._num_versions > 1:  # nothing was learned before the first one
                self.renew()
        return self._epochs[version.id]


class _DrawHistory:
    """Which draws were made before. Text that the same draw wrote before is accepted more often
    than the target's distribution says, and the same draft has the same verdict again, so repeated
    draws are not audited."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def add(self, stream: Stream) -> bool:
        """Whether it was there already."""
        params = stream.params
        key = (stream.group, params.seed, stream.sample_index, params.temperature)
        digest = blake2b(repr(key).encode(), digest_size=16).digest()
        is_repeated = digest in self._digests
        self._digests[digest] = None
        self._digests.move_to_end(digest)
        if len(self._digests) > MAX_DRAWS:
            self._digests.popitem(last=False)
        return is_repeated


def _round_of(entries: Sequence[_SampleRound], times: Times, unsure_below: float) -> Round:
    return Round(
        tuple(entry.limit for entry in entries),
        tuple(entry.draft.confidences for entry in entries),
        tuple(entry.num_verified for entry in entries),
        tuple(entry.num_accepted for entry in entries),
        times,
        sum(len(entry.sample.tokens) for entry in entries) / len(entries),
        tuple(entry.group for entry in entries),
        tuple(entry.ended for entry in entries),
        tuple(entry.foreseen for entry in entries),
        unsure_below,
    )


def _coupled(drawn: Drawn, row: int, token: int, draft: DraftDistribution) -> float:
    """The chance that a token drawn from `draft` is accepted; NaN at temperature 0, where nothing
    is drawn."""
    if drawn.rows[row].is_greedy:
        return nan
    target = drawn.distribution(row)[0].double().exp().cpu().numpy()
    return coupled_chance(target, draft.dense(len(target)), token)


def _group(sample: Sample) -> bytes:
    # With the salt: a draft out of another's text would tell by its speed that this text was seen.
    request = sample.job.request
    place = f"{sample.job.version.base.name}\0{request.cache_salt}\0".encode()
    return blake2b(place + request.prompt.tobytes(), digest_size=16).digest()
