"""Drafts for the samples of one base model: when to ask for them, what stood, what is learned.

The engine calls, round by round: `propose` with the samples that wait for a token, `judged` for
each of them once the target's tokens are drawn, `round_over` with the time that it took. Nothing
here can change a token: a draft stands where it is what the target draws anyway.
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
from tinkercloud.embedded.sampling.sequences import Sequence as Sample
from tinkercloud.embedded.sampling.trace import Trace, TracedDraft
from tinkercloud.speculative.draft_length.fixed_length import DraftLength
from tinkercloud.speculative.draft_length.rounds import Kind, Load, Reason, Round, Times
from tinkercloud.speculative.drafters.draft_distribution import DraftDistribution
from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft, Stream
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter
from tinkercloud.speculative.learning.collecting import JudgedToken
from tinkercloud.speculative.observability.telemetry import RoundReport, Telemetry
from tinkercloud.speculative.verify import coupled_chance

REST, PATIENCE = 7, 2
"""Rounds that go by without deciding: so many after one in which nobody was asked, and up to so
many where drafts cost nothing but none was worth verifying, one more for each PATIENCE rounds of
that. Finding it out again in every round would be most of what drafts cost."""
MOST_KNOWN = 65_536
"""Draws that are remembered: text that the same draw wrote before stands more often than the
target's law says, and the same draft has the same verdict again, so they are not audited."""


class Listener(Protocol):
    """Who learns from what became of drafts. category: the model whose samples they were for."""

    @property
    def version_lag(self) -> int:
        """Steps of the policy since the draft that is used was made."""
        ...

    def drafted(self, category: str, num_judged: int, num_accepted: int) -> None:
        """In one round; judged are those that stand, and of each draft the first that does not."""
        ...

    def judged(self, stream: Stream, verdict: JudgedToken, category: str) -> None: ...

    def ended(self, stream: Stream) -> None: ...


@dataclass(slots=True)
class _Turn:
    """A sample in the round underway. verified: what of the draft the target sees."""

    sample: Sample
    group: Hashable
    asked: int
    draft: Draft
    verified: int
    accepted: int = 0
    ended: bool = False
    chances: tuple[float, ...] = ()
    is_judged: bool = False


class Speculation:
    def __init__(
        self,
        drafter: GuardedDrafter,
        policy: DraftLength,
        trace: Trace | None = None,
        listener: Listener | None = None,
    ):
        self._drafter, self._policy, self._trace = drafter, policy, trace
        self._listener = listener
        self._telemetry = Telemetry()
        self._streams: dict[Sample, Stream] = {}
        self._living: Counter[Hashable] = Counter()  # by group
        self._epochs: dict[str, int] = {}  # of versions, in the order in which they came
        self._num_versions = 0
        self._num_streams = 0
        self._known: OrderedDict[bytes, None] = OrderedDict()  # draws that were made before
        self._repeated: set[Sample] = set()
        self._round: dict[Sample, _Turn] = {}
        self._draft_ms = self._host_ms = 0.0
        self._rest = self._num_idle = 0
        self._unread: Counter[Sample] = Counter()  # tokens that the drafter was not told of

    # ---- samples come and go

    def begin(self, sample: Sample) -> None:
        """With its first token, or with all that it has where it takes up its blocks again."""
        job, group = sample.job, _group(sample)
        stream = Stream(
            self._num_streams, group, job.version.id, self._epoch(job.version), sample.tokens,
            job.num_prompt, job.request.params, sample.index,
        )  # fmt: skip
        self._num_streams += 1
        self._streams[sample] = stream
        self._living[group] += 1
        if self._was_drawn_before(stream):
            self._repeated.add(sample)
        self._drafter.begin(stream)

    @property
    def layers(self) -> tuple[int, ...]:
        """Of the target, whose outputs the drafter wants to see."""
        return self._drafter.layers

    def saw(self, sample: Sample, first: int, hidden: Tensor) -> None:
        """hidden (n, L, D) of the tokens from place `first` on, before what comes after the last of
        them is told by `wrote`."""
        self._drafter.observe_hidden(self._streams[sample], first, hidden)

    def wrote(self, sample: Sample, num_new: int) -> None:
        self._unread[sample] += num_new
        if not self._rest:
            self._tell(sample)

    def _tell(self, sample: Sample) -> None:
        num_new = self._unread.pop(sample, 0)
        if num_new:
            self._drafter.observe(self._streams[sample], num_new)

    def end(self, sample: Sample) -> None:
        """Finished, dropped, or begun anew."""
        if sample not in self._streams:
            return
        self._tell(sample)
        stream = self._streams.pop(sample)
        self._repeated.discard(sample)
        if sample in self._round and not self._round[sample].is_judged:
            del self._round[sample]
        self._living[stream.group] -= 1
        if not self._living[stream.group]:
            del self._living[stream.group]
        self._drafter.end(stream)
        if self._listener is not None:
            self._listener.ended(stream)

    def renew(self) -> None:
        """The drafter is another one: what was counted of it is worth less."""
        self._policy.renew()

    def end_all(self) -> None:
        for sample in list(self._streams):
            self.end(sample)

    def forget(self, version_id: str) -> None:
        self._epochs.pop(version_id, None)

    # ---- a round

    def propose(self, samples: Sequence[Sample]) -> list[tuple[int, ...]]:
        """Drafted tokens for each, to be verified."""
        if self._rest:
            self._rest -= 1
            return [()] * len(samples)
        began = time.perf_counter()
        for sample in list(self._unread):
            self._tell(sample)
        limits = self._policy.limits([self._load(sample) for sample in samples])
        if self._policy.kind is not Kind.COMPARISON and not any(limits):
            self._rest = REST
        asked = [
            (self._streams[sample], min(limit, sample.num_left - 1))
            for sample, limit in zip(samples, limits, strict=True)
        ]
        drafts, drafting_ms = [NO_DRAFT] * len(samples), 0.0
        if any(limit for _, limit in asked):
            asked_at = time.perf_counter()
            drafts = self._drafter.propose(asked)
            drafting_ms = 1e3 * (time.perf_counter() - asked_at)
        chosen = self._policy.choose([draft.confidences for draft in drafts])
        self._num_idle = 0 if any(chosen) else self._num_idle + 1
        self._rest = max(self._rest, min(self._num_idle // PATIENCE, REST))
        self._round = {
            sample: _Turn(sample, stream.group, limit, draft, min(num, len(draft.tokens)))
            for sample, (stream, limit), draft, num in zip(
                samples, asked, drafts, chosen, strict=True
            )
        }
        self._draft_ms = drafting_ms
        self._host_ms = 1e3 * (time.perf_counter() - began) - drafting_ms
        return [turn.draft.tokens[: turn.verified] for turn in self._round.values()]

    def cut(self, sample: Sample) -> None:
        """There was no room for its draft."""
        if sample in self._round:
            self._round[sample].verified = 0

    def judged(self, sample: Sample, num_new: int, drawn: Drawn, rows: Sequence[int]) -> None:
        """num_new: the sample's tokens of this round. rows: those of `drawn` that its draft was
        verified with, and the one after."""
        turn = self._round.get(sample)
        if turn is None:
            return
        num_judged = min(turn.verified, num_new)
        last = turn.draft.tokens[num_new - 1] if num_judged == num_new else None
        turn.ended = last == sample.tokens[-1]  # a stop is among what stands: nothing comes after
        turn.accepted, turn.is_judged = num_new - 1 + turn.ended, True
        if not num_judged:
            return
        if sample not in self._repeated:
            turn.chances = self._chances(turn.draft, drawn, rows[:num_judged])
        if self._listener is not None:
            at = num_judged - 1  # what did not stand, or the last that did
            position = len(sample.tokens) - num_new + at
            verdict = JudgedToken(
                position,
                turn.draft.tokens[at],
                sample.tokens[position],
                lambda: drawn.distribution(rows[at]).exp(),
            )
            category = sample.job.version.origin
            self._listener.judged(self._streams[sample], verdict, category)

    def _chances(self, draft: Draft, drawn: Drawn, rows: Sequence[int]) -> tuple[float, ...]:
        """Of each judged token to stand; () where the draft is not audited."""
        if not self._drafter.is_coupled:
            return drawn.chances(rows, draft.tokens)
        return tuple(
            _coupled(drawn, row, token, distribution)
            for row, token, distribution in zip(
                rows, draft.tokens, draft.distributions, strict=False
            )
        )

    def round_over(self, whole_ms: float, *, usable: bool) -> None:
        """whole_ms: of the round, its drafting included. usable: it was nothing but this round."""
        turns, self._round = list(self._round.values()), {}
        if not turns:
            return
        verify_ms = max(0.0, whole_ms - self._draft_ms - self._host_ms)
        times = Times(self._draft_ms, verify_ms, self._host_ms, usable)
        context = sum(len(turn.sample.tokens) for turn in turns) / len(turns)
        told = Round(
            tuple(turn.asked for turn in turns),
            tuple(turn.draft.confidences for turn in turns),
            tuple(turn.verified for turn in turns),
            tuple(turn.accepted for turn in turns),
            times,
            context,
            tuple(turn.group for turn in turns),
            tuple(turn.ended for turn in turns),
        )
        self._policy.observe(told)
        self._tell_listener(turns, told)
        chances = tuple(turn.chances for turn in turns)
        lag = self._listener.version_lag if self._listener is not None else 0
        report = RoundReport(
            self._drafter.name, self._policy.kind, self._policy.reason, told, chances, lag
        )
        if self._telemetry.record(report):
            self._policy.stop(Reason.ALARM)
        elif self._drafter.off_reason is not None:
            self._policy.stop(Reason.OFF)
        if self._trace is not None:
            drafts = [
                TracedDraft(turn.sample, turn.draft, turn.verified, turn.accepted, turn.ended)
                for turn in turns
                if turn.verified
            ]
            self._trace.round(self._drafter.name, str(self._policy.kind), drafts, times)

    def _tell_listener(self, turns: Sequence[_Turn], told: Round) -> None:
        if self._listener is None or not told.num_verified:
            return
        judged, stood = Counter[str](), Counter[str]()
        for turn, num in zip(turns, told.num_judged, strict=True):
            category = turn.sample.job.version.origin
            judged[category] += num
            stood[category] += turn.accepted
        for category, num in judged.items():
            self._listener.drafted(category, num, stood[category])

    # ---- for those who watch

    def snapshot(self) -> dict[str, Any]:
        refused = dict(self._drafter.num_refused)
        return {
            **self._telemetry.snapshot(),
            "on": self._policy.is_on,
            "reason": str(self._policy.reason),
            "refused": refused,
            "drafter_off": self._drafter.off_reason,
        }

    def lines(self) -> list[str]:
        """In Prometheus' text format."""
        return self._telemetry.lines()

    # ----

    def _load(self, sample: Sample) -> Load:
        group = self._streams[sample].group
        wanted = sample.job.request.speculate
        return Load(len(sample.tokens), group, sample.num_left, self._living[group], wanted)

    def _epoch(self, version: Version) -> int:
        if version.id not in self._epochs:
            self._epochs[version.id] = self._num_versions
            self._num_versions += 1
            self._policy.renew()
        return self._epochs[version.id]

    def _was_drawn_before(self, stream: Stream) -> bool:
        params = stream.params
        told = (stream.group, params.seed, stream.sample_index, params.temperature)
        digest = blake2b(repr(told).encode(), digest_size=16).digest()
        known = digest in self._known
        self._known[digest] = None
        self._known.move_to_end(digest)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return known


def _coupled(drawn: Drawn, row: int, token: int, own: DraftDistribution) -> float:
    """The chance that a token drawn from `own` stands; NaN at temperature 0, where nothing is
    drawn."""
    if drawn.rows[row].is_greedy:
        return nan
    law = drawn.distribution(row)[0].double().exp().cpu().numpy()
    return coupled_chance(law, own.dense(len(law)), token)


def _group(sample: Sample) -> bytes:
    job = sample.job
    name = job.version.base.name.encode()
    return blake2b(name + b"\0" + job.request.prompt.tobytes(), digest_size=16).digest()
