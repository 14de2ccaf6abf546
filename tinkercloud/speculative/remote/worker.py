"""A draft worker: samples of many engines, and drafts for them, without the transport.

One thread computes (`run`). It merges the rounds that have come into one batch, answers them, and
then, until others come, prepares answers to what the target may say (`outcomes`). What is prepared
is sent at once, so that the engine finds it without asking. A round that comes ends such work
between two steps of the drafter, and where it says what was prepared for, that is the answer.
"""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tinkercloud.errors import ConfigError
from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft, Drafter
from tinkercloud.speculative.remote import draft_pb2 as pb
from tinkercloud.speculative.remote.engines import EngineConnection, Sample
from tinkercloud.speculative.remote.learned_weights import LearnedWeights
from tinkercloud.speculative.remote.messages import (
    PROTOCOL,
    BadMessage,
    Target,
    branch,
    check_tokens,
    stream_of,
    tokenizer_of,
)
from tinkercloud.speculative.remote.outcomes import Outcome, Outlook
from tinkercloud.speculative.remote.stream_worker import StreamWorker

logger = logging.getLogger(__name__)

T = TypeVar("T")
AT_ONCE, MAX_ROWS = 4, 64  # outcomes of a sample, and of all, in one batch


class NeedsTokenizer(Exception):
    """The target's tokens are others than the draft's, and its tokenizer is not known yet."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """num_samples: of all engines; beyond, those that were drafted for longest ago are forgotten,
    and so are those that were not for idle_s. num_outcomes: that are prepared for, of each sample
    in each round."""

    num_samples: int = 256
    idle_s: float = 600.0
    num_tokens: int = 131_072
    num_drafted: int = 64
    num_outcomes: int = 8


@dataclass(frozen=True, slots=True)
class _Next:
    """An outcome that is prepared for."""

    sample: Sample
    outlook: Outlook
    chance: float
    outcome: Outcome


Learn = Callable[[Target, Drafter, LearnedWeights], Drafter]
"""A drafter with these weights, for the engine that has this one; the same one where it is the
engine's alone. Raises ConfigError where they are not of its model."""


def _nothing_to_learn(_target: Target, drafter: Drafter, _weights: LearnedWeights) -> Drafter:
    raise ConfigError(f"the drafter {drafter.name} has no weights")


class DraftWorker(StreamWorker[EngineConnection]):
    """make: a drafter for a target, the same one for equal vocabularies; raises NeedsTokenizer, or
    ConfigError where there can be none."""

    def __init__(
        self, make: Callable[[Target], Drafter], limits: WorkerLimits | None = None,
        learn: Learn = _nothing_to_learn,
    ):  # fmt: skip
        self._limits = limits or WorkerLimits()
        super().__init__(EngineConnection, self._limits.idle_s)
        self._make, self._learn = make, learn
        self._samples: OrderedDict[int, Sample] = OrderedDict()  # the longest unused first
        self._ahead: dict[Sample, Outlook] = {}  # those with outcomes to prepare for
        self._num_streams = 0
        self._drafters: set[Drafter] = set()  # those of engines that have gone, too
        self.counts: Counter[str] = Counter()

    def stats(self) -> dict[str, int]:
        return {**super().stats(), "samples": len(self._samples), **self.counts}

    def step(self, wait_s: float = 0.0) -> bool:
        """One batch of answers, or one batch of what may be asked next; whether there was any."""
        messages, is_ahead = self._take(0.0 if self._ahead else wait_s), bool(self._ahead)
        if messages:
            self._answer(messages)
        elif is_ahead:
            self._prepare()
        self._forget_idle()
        return bool(messages) or is_ahead

    def _answer(self, messages: Sequence[tuple[EngineConnection, pb.ToWorker | None]]) -> None:
        requests: dict[Sample, int] = {}  # tokens that the newest question of each is for
        forgotten: dict[tuple[EngineConnection, int], list[int]] = {}
        for connection, message in messages:
            if connection not in self._open:
                continue
            try:
                if message is None:
                    self.close(connection)
                elif message.HasField("hello"):
                    self._greet(connection, message.hello)
                elif message.HasField("round"):
                    key = (connection, message.round.number)
                    forgotten[key] = self._read(connection, message.round, requests)
                elif message.HasField("weights"):
                    self._take_weights(connection, message.weights)
                else:
                    raise BadMessage("a message of no known kind")
            except BadMessage as error:
                self._refuse(connection, str(error))
        requests = {s: most for s, most in requests.items() if s.stream.id in self._samples}
        drafts = self._draft(requests)
        for (connection, number), gone in forgotten.items():
            if connection not in self._open:
                continue
            branches = [
                branch(sample.id, len(sample.stream.tokens), (), draft)
                for sample, draft in drafts.items()
                if sample.connection is connection and draft.tokens
            ]
            self._send(connection, pb.Drafts(round=number, branches=branches, forgotten=gone))

    def _greet(self, connection: EngineConnection, hello: pb.Hello) -> None:
        """Raises BadMessage."""
        if hello.protocol != PROTOCOL:
            raise BadMessage(f"the engine speaks protocol {hello.protocol}, this worker {PROTOCOL}")
        if not hello.vocab_size:
            raise BadMessage("a target without a vocabulary")
        target = Target(
            hello.model, hello.model_digest, hello.vocab_size, hello.vocabulary_digest,
            tokenizer_of(hello),
        )  # fmt: skip
        try:
            connection.drafter = self._make(target)
            self._drafters.add(connection.drafter)
        except NeedsTokenizer:
            if target.tokenizer is not None:
                raise BadMessage("the target's tokenizer is not the one that it named") from None
            connection.send(pb.ToEngine(welcome=pb.Welcome(needs_tokenizer=True)))
            return
        except ConfigError as error:
            raise BadMessage(str(error)) from None
        connection.target = target
        connection.send(pb.ToEngine(welcome=pb.Welcome(drafter=connection.drafter.name)))
        logger.info("engine %d: drafts for %s", connection.number, hello.model)

    def _take_weights(self, connection: EngineConnection, message: pb.Weights) -> None:
        """Drafts with them once all of them are here. Raises BadMessage."""
        target, before = connection.target, connection.drafter
        if target is None or before is None:
            raise BadMessage("weights before the engine was welcome")
        weights = connection.weights.add(message)
        if weights is None:
            return
        try:
            drafter = self._learn(target, before, weights)
        except ConfigError as error:
            logger.warning("engine %d: its weights are not used: %s", connection.number, error)
            return
        for sample in connection.samples.values():
            self._ahead.pop(sample, None)
            sample.outlook = None
            if drafter is not before:
                before.end(sample.stream)
                drafter.begin(sample.stream)
        connection.drafter, connection.has_learned = drafter, True
        self._drafters.add(drafter)
        self.counts["weights"] += 1
        logger.info("engine %d: drafts with weights %s", connection.number, weights.short_digest)

    def _read(
        self, connection: EngineConnection, message: pb.Round, requests: dict[Sample, int]
    ) -> list[int]:
        """Adds to `requests`; returns the engine's ids of samples that are not here. Raises
        BadMessage."""
        if connection.drafter is None:
            raise BadMessage("a round before the engine was welcome")
        for number in message.ended:
            if number in connection.samples:
                self._end(connection.samples[number])
        for begun in message.begun:
            self._begin(connection, begun)
        gone = []
        for delta in message.deltas:
            sample = connection.samples.get(delta.id)
            if sample is None or len(sample.stream.tokens) + len(delta.tokens) != delta.length:
                if sample is not None:
                    self._end(sample)  # a round of it was lost
                gone.append(delta.id)
                continue
            self._extend(sample, delta)
            if delta.max_tokens:
                sample.round = message.number
                requests[sample] = min(delta.max_tokens, self._limits.num_drafted)
        return gone

    def _begin(self, connection: EngineConnection, message: pb.Begin) -> None:
        """Raises BadMessage."""
        target, drafter = connection.target, connection.drafter
        assert target is not None and drafter is not None
        if message.id in connection.samples:
            self._end(connection.samples[message.id])
        if len(message.tokens) > self._limits.num_tokens:
            raise BadMessage(f"{len(message.tokens)} tokens of {self._limits.num_tokens}")
        stream = stream_of(message, self._num_streams, target.vocab_size)
        self._num_streams += 1
        sample = Sample(connection, message.id, stream, time.monotonic())
        connection.samples[message.id] = self._samples[stream.id] = sample
        drafter.begin(stream)
        while len(self._samples) > self._limits.num_samples:
            self.counts["evicted"] += 1
            self._end(next(iter(self._samples.values())))

    def _extend(self, sample: Sample, delta: pb.Delta) -> None:
        """Raises BadMessage."""
        target, drafter = sample.connection.target, sample.connection.drafter
        assert target is not None and drafter is not None
        check_tokens(delta.tokens, target.vocab_size)
        sample.used_s = time.monotonic()
        self._samples.move_to_end(sample.stream.id)
        if delta.tokens:
            sample.stream.tokens.extend(delta.tokens)
            drafter.observe(sample.stream, len(delta.tokens))

    def _draft(self, requests: Mapping[Sample, int]) -> dict[Sample, Draft]:
        """What was prepared, and of each drafter one batch for the others."""
        drafts: dict[Sample, Draft] = {}
        for sample, most in requests.items():
            outlook, tokens = sample.outlook, sample.stream.tokens
            drafts[sample] = NO_DRAFT
            if outlook is not None:
                outlook.learn(tokens)
                drafts[sample] = outlook.answer(tokens, most)
        missing = [sample for sample, draft in drafts.items() if not draft.tokens]
        self.counts["foreseen"] += len(drafts) - len(missing)
        for drafter, samples in _by_drafter(missing, lambda sample: sample):
            drafter.catch_up([sample.stream for sample in samples])
            drawn = drafter.propose([(sample.stream, requests[sample]) for sample in samples])
            drafts.update(zip(samples, drawn, strict=True))
            self.counts["drafts"] += len(drawn)
            self.counts["tokens"] += sum(len(draft.tokens) for draft in drawn)
        for sample, draft in drafts.items():
            self._ahead.pop(sample, None)
            sample.outlook = None
            if draft.tokens and self._limits.num_outcomes:
                length, calibration = len(sample.stream.tokens), sample.connection.calibration
                outlook = Outlook(length, requests[sample], draft, calibration)
                sample.outlook = self._ahead[sample] = outlook
        return drafts

    # ---- what may be asked next

    def _prepare(self) -> None:
        """The likeliest outcomes of all samples that have any left."""
        share = max(1, min(AT_ONCE, MAX_ROWS // len(self._ahead)))
        batch: list[_Next] = []
        for sample, outlook in list(self._ahead.items()):
            left = self._limits.num_outcomes + 1 - len(outlook.guesses)
            outcomes = outlook.likeliest(min(share, left))
            if not outcomes:
                del self._ahead[sample]
            batch += [_Next(sample, outlook, *each) for each in outcomes]
        for drafter, items in _by_drafter(batch, lambda each: each.sample):
            drafts = drafter.propose_after(
                [(e.sample.stream, e.outcome.after, e.outcome.num_tokens) for e in items],
                lambda: bool(self._inbox),
            )
            if drafts is None:
                self.counts["interrupted"] += 1
                for each in items:
                    each.outlook.put_back(each.chance, each.outcome)
            else:
                self._send_prepared(list(zip(items, drafts, strict=True)))

    def _send_prepared(self, drafted: "Sequence[tuple[_Next, Draft]]") -> None:
        sent: dict[tuple[EngineConnection, int], list[pb.Branch]] = {}
        for each, draft in drafted:
            each.outlook.prepared(each.chance, each.outcome, draft)
            if draft.tokens:
                sample = each.sample
                prepared = branch(sample.id, each.outlook.base, each.outcome.after, draft)
                sent.setdefault((sample.connection, sample.round), []).append(prepared)
        for (connection, number), branches in sent.items():
            self.counts["prepared"] += len(branches)
            self._send(connection, pb.Drafts(round=number, branches=branches))

    # ---- ends

    def _send(self, connection: EngineConnection, drafts: pb.Drafts) -> None:
        if not connection.send(pb.ToEngine(drafts=drafts)):
            self.counts["dropped"] += 1

    def _refuse(self, connection: EngineConnection, reason: str) -> None:
        logger.warning("engine %d is refused: %s", connection.number, reason)
        connection.send(pb.ToEngine(refusal=pb.Refusal(reason=reason)))
        self.close(connection)

    def close(self, connection: EngineConnection) -> None:
        for sample in list(connection.samples.values()):
            self._end(sample)
        if connection.has_learned and connection.drafter is not None:
            self._drafters.discard(connection.drafter)
        super().close(connection)

    def _end(self, sample: Sample) -> None:
        del sample.connection.samples[sample.id]
        del self._samples[sample.stream.id]
        self._ahead.pop(sample, None)
        assert sample.connection.drafter is not None
        sample.connection.drafter.end(sample.stream)

    def _forget_idle(self) -> None:
        before = self._idle_before()
        if before is None:
            return
        for drafter in self._drafters:
            drafter.forget_ended(before)
        for sample in list(self._samples.values()):
            if sample.used_s > before:
                return
            self.counts["expired"] += 1
            self._end(sample)


def _by_drafter(
    items: Sequence[T], sample_of: Callable[[T], Sample]
) -> Iterable[tuple[Drafter, list[T]]]:
    batches: dict[Drafter, list[T]] = {}
    for item in items:
        drafter = sample_of(item).connection.drafter
        assert drafter is not None
        batches.setdefault(drafter, []).append(item)
    return batches.items()
