"""A draft worker: what engines send it, what it keeps, what it answers."""

import dataclasses
import time
import zlib
from collections.abc import Callable, Sequence

import pytest

from tests.speculative.remote.workers import TARGET, worker_of
from tinkercloud.core.types import SamplingParams
from tinkercloud.errors import ConfigError
from tinkercloud.speculative.drafters.drafter import Draft, Drafter, Stream
from tinkercloud.speculative.remote import draft_pb2 as pb
from tinkercloud.speculative.remote import messages
from tinkercloud.speculative.remote.messages import PROTOCOL, Target
from tinkercloud.speculative.remote.worker import (
    DraftWorker,
    EngineConnection,
    NeedsTokenizer,
    WorkerLimits,
)


class Counting(Drafter):
    """Drafts the numbers after the last token; its second choice is always 99."""

    name = "counting"

    def __init__(self) -> None:
        self.live: set[int] = set()
        self.batches: list[int] = []
        self.prepared: list[int] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self.forgotten_s: list[float] = []

    def begin(self, stream: Stream) -> None:
        self.live.add(stream.id)

    def end(self, stream: Stream) -> None:
        self.live.remove(stream.id)

    def forget_ended(self, before_s: float) -> None:
        self.forgotten_s.append(before_s)

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        self.batches.append(len(requests))
        return [_next(stream.tokens[-1], most) for stream, most in requests]

    def propose_after(
        self, requests: Sequence[tuple[Stream, Sequence[int], int]], is_stale: Callable[[], bool]
    ) -> list[Draft] | None:
        self.prepared.append(len(requests))
        self.meanwhile()
        return None if is_stale() else [_next(after[-1], most) for _, after, most in requests]


def _next(last: int, most: int) -> Draft:
    tokens = tuple(range(last + 1, last + 1 + most))
    return Draft(tokens, tuple(0.9 - 0.1 * i for i in range(most)), seconds=(99,) * most)


def begin(number: int, tokens: Sequence[int]) -> pb.Begin:
    params = pb.Params(seed=1, temperature=1.0, top_k=-1, top_p=1.0)
    return pb.Begin(id=number, tokens=tokens, num_prompt=1, params=params)


def delta(number: int, length: int, tokens: Sequence[int] = (), most: int = 3) -> pb.Delta:
    return pb.Delta(id=number, length=length, tokens=tokens, max_tokens=most)


def say(
    worker: DraftWorker, connection: EngineConnection, message: pb.ToWorker
) -> list[pb.ToEngine]:
    """The answers, without what is prepared afterwards."""
    worker.receive(connection, message)
    worker.step()
    return heard(connection)


def heard(connection: EngineConnection) -> list[pb.ToEngine]:
    messages = []
    while not connection.outgoing.empty():
        message = connection.outgoing.get()
        if message is not None:
            messages.append(message)
    return messages


def tell(
    worker: DraftWorker, connection: EngineConnection, number: int = 1, **parts: object
) -> pb.Drafts:
    (answer,) = say(worker, connection, pb.ToWorker(round=pb.Round(number=number, **parts)))
    return answer.drafts


def welcome(worker: DraftWorker) -> EngineConnection:
    connection = worker.open()
    (answer,) = say(worker, connection, TARGET.hello())
    assert answer.welcome.drafter == "counting"
    return connection


def test_each_token_travels_once() -> None:
    worker = worker_of(Counting)
    engine = welcome(worker)
    answer = tell(worker, engine, begun=[begin(7, [1, 2])], deltas=[delta(7, 2)])
    (found,) = answer.branches
    assert (found.id, found.base, list(found.tokens)) == (7, 2, [3, 4, 5])
    assert list(found.confidences) == [round(255 * c) for c in (0.9, 0.8, 0.7)]
    answer = tell(worker, engine, number=2, deltas=[delta(7, 4, [3, 40])])
    assert [list(b.tokens) for b in answer.branches] == [[41, 42, 43]]


def test_a_round_of_one_more_token_and_its_answer_have_some_bytes() -> None:
    worker = worker_of(Counting)
    engine = welcome(worker)
    tell(worker, engine, begun=[begin(7, [1] * 500)], deltas=[delta(7, 500)])
    message = pb.ToWorker(round=pb.Round(number=1000, deltas=[delta(7, 505, [2] * 5, most=8)]))
    (answer,) = say(worker, engine, message)
    assert len(answer.drafts.branches[0].tokens) == 8
    assert message.ByteSize() + answer.ByteSize() < 100


def test_what_the_target_may_say_is_prepared_likeliest_first() -> None:
    worker = worker_of(Counting, WorkerLimits(num_outcomes=3))
    engine = welcome(worker)
    tell(worker, engine, begun=[begin(7, [1, 2])], deltas=[delta(7, 2)])
    while worker.step():
        pass
    prepared = [list(b.tokens) for m in heard(engine) for b in m.drafts.branches]
    assert prepared[0] == [3, 4, 5, 6, 7, 8, 9], "the whole draft, and what comes after it"
    # Rejected in the third place, where the confidence is lowest, and in the first.
    assert prepared[1:] == [[3, 4, 99, 100, 101, 102], [99, 100, 101, 102]]


def test_what_was_prepared_is_the_answer_and_what_comes_after_it_is_prepared() -> None:
    drafter = Counting()
    worker = worker_of(lambda: drafter)
    engine = welcome(worker)
    tell(worker, engine, begun=[begin(7, [1, 2])], deltas=[delta(7, 2)])
    while worker.step():
        pass
    heard(engine)
    for number, tokens in ((2, [3, 4, 5, 6]), (3, [7, 99])):
        length = 2 + (4 if number == 2 else 6)
        answer = tell(worker, engine, number=number, deltas=[delta(7, length, tokens)])
        expected = list(range(tokens[-1] + 1, tokens[-1] + 4))
        assert [list(b.tokens) for b in answer.branches] == [expected]
        while worker.step():
            pass
        assert any(list(b.tokens)[:3] == expected for m in heard(engine) for b in m.drafts.branches)
    assert drafter.batches == [1], "asked once"
    assert worker.stats()["foreseen"] == 2


def test_outcomes_of_outcomes_are_prepared_too() -> None:
    worker = worker_of(Counting, WorkerLimits(num_outcomes=8))
    engine = welcome(worker)
    tell(worker, engine, begun=[begin(7, [1, 2])], deltas=[delta(7, 2)])
    while worker.step():
        pass
    prepared = [list(b.tokens) for m in heard(engine) for b in m.drafts.branches]
    assert len(prepared) == 8
    assert [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13] in prepared, "taken whole, twice"
    assert [3, 4, 5, 6, 7, 8, 99, 100, 101, 102] in prepared


def test_a_round_ends_what_is_being_prepared_between_two_steps() -> None:
    drafter = Counting()
    worker = worker_of(lambda: drafter)
    engine, other = welcome(worker), welcome(worker)
    tell(worker, engine, begun=[begin(7, [1, 2])], deltas=[delta(7, 2)])
    tell(worker, other, begun=[begin(7, [50])], deltas=[delta(7, 1)])

    def another_round_comes() -> None:
        drafter.meanwhile = lambda: None
        message = pb.Round(number=2, deltas=[delta(7, 3, [9])])
        worker.receive(engine, pb.ToWorker(round=message))

    drafter.meanwhile = another_round_comes
    worker.step()
    assert not heard(engine)
    worker.step()
    (answer,) = heard(engine)
    assert [list(b.tokens) for b in answer.drafts.branches] == [[10, 11, 12]]
    while worker.step():
        pass
    assert {b.base for m in heard(engine) for b in m.drafts.branches} == {3}
    prepared = [list(b.tokens)[:4] for m in heard(other) for b in m.drafts.branches]
    assert [51, 52, 53, 54] in prepared, "the other engine's are prepared all the same"
    assert worker.stats()["interrupted"] == 1


def test_a_new_round_ends_what_was_being_prepared() -> None:
    worker = worker_of(Counting)
    engine = welcome(worker)
    tell(worker, engine, begun=[begin(7, [1, 2])], deltas=[delta(7, 2)])
    answer = tell(worker, engine, number=2, deltas=[delta(7, 3, [9])])
    assert [list(b.tokens) for b in answer.branches] == [[10, 11, 12]]
    while worker.step():
        pass
    assert {b.base for m in heard(engine) for b in m.drafts.branches} == {3}


def test_engines_that_ask_at_once_share_a_batch() -> None:
    drafter = Counting()
    worker = worker_of(lambda: drafter)
    engines = [welcome(worker), welcome(worker)]
    for engine in engines:
        message = pb.Round(number=1, begun=[begin(0, [1]), begin(1, [5])],
                           deltas=[delta(0, 1), delta(1, 1)])  # fmt: skip
        worker.receive(engine, pb.ToWorker(round=message))
    worker.step()
    assert drafter.batches == [4]
    for engine in engines:
        (answer,) = heard(engine)
        assert [list(b.tokens) for b in answer.drafts.branches] == [[2, 3, 4], [6, 7, 8]]


def test_a_salt_travels_as_what_tells_it_from_others() -> None:
    salts = []
    for salt in ("secret of a user", "another", ""):
        params = SamplingParams(max_tokens=None, seed=0)
        one = Stream(0, b"", "v", 0, [1, 2], 1, params, 0, salt)
        message = messages.begin(one, 2)
        assert b"secret" not in message.SerializeToString()
        salts.append(messages.stream_of(message, 0, 260).salt)
    assert len(set(salts)) == 3
    assert salts[2] == ""


def test_a_lost_round_is_noticed_and_the_sample_begins_again() -> None:
    worker = worker_of(Counting)
    engine = welcome(worker)
    tell(worker, engine, begun=[begin(7, [1, 2])], deltas=[delta(7, 2)])
    answer = tell(worker, engine, number=3, deltas=[delta(7, 9, [5]), delta(8, 3, [5])])
    assert list(answer.forgotten) == [7, 8]
    assert not answer.branches
    assert worker.stats()["samples"] == 0


def test_beyond_the_limit_the_longest_unused_are_forgotten() -> None:
    drafter = Counting()
    worker = worker_of(lambda: drafter, WorkerLimits(num_samples=2))
    engine = welcome(worker)
    for number in (1, 2):
        tell(worker, engine, begun=[begin(number, [1])], deltas=[delta(number, 1)])
    tell(worker, engine, deltas=[delta(1, 2, [2])])
    tell(worker, engine, begun=[begin(3, [1])], deltas=[delta(3, 1)])
    assert list(tell(worker, engine, deltas=[delta(2, 2, [2])]).forgotten) == [2]
    assert not tell(worker, engine, deltas=[delta(1, 3, [3])]).forgotten
    assert len(drafter.live) == 2
    assert worker.stats()["evicted"] == 1


def test_idle_samples_are_forgotten() -> None:
    drafter = Counting()
    worker = worker_of(lambda: drafter, WorkerLimits(idle_s=0.0))
    engine = welcome(worker)
    tell(worker, engine, begun=[begin(1, [1])], deltas=[delta(1, 1)])
    while worker.step():
        pass
    assert not drafter.live
    assert worker.stats()["expired"] == 1
    assert drafter.forgotten_s, "and what is left of those that ended"


def test_a_worker_that_always_has_work_forgets_too() -> None:
    worker = worker_of(Counting, WorkerLimits(idle_s=0.05))
    engine = welcome(worker)
    tell(worker, engine, begun=[begin(1, [1]), begin(2, [1])], deltas=[delta(1, 1), delta(2, 1)])
    length, end_s = 1, time.monotonic() + 0.3
    while time.monotonic() < end_s:
        length += 1
        assert not tell(worker, engine, deltas=[delta(2, length, [2])]).forgotten
    assert worker.stats()["expired"] == 1
    assert list(tell(worker, engine, deltas=[delta(1, 2, [2])]).forgotten) == [1]


def test_an_engine_that_goes_or_ends_its_samples_leaves_nothing() -> None:
    drafter = Counting()
    worker = worker_of(lambda: drafter)
    engine, other = welcome(worker), welcome(worker)
    for each in (engine, other):
        parts = {"begun": [begin(1, [1]), begin(2, [1])], "deltas": [delta(1, 1), delta(2, 1)]}
        tell(worker, each, **parts)
    tell(worker, engine, ended=[1, 77])
    assert len(drafter.live) == 3
    say(worker, engine, None)
    assert len(drafter.live) == 2
    say(worker, other, None)
    assert not drafter.live
    assert worker.stats() | {"drafts": 0, "tokens": 0} == {
        "connections": 0, "samples": 0, "drafts": 0, "tokens": 0, "foreseen": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        ({"begun": [begin(1, [1, 260])]}, "token 260 of a vocabulary of 260"),
        ({"begun": [begin(1, [])]}, "are a prompt"),
        ({"begun": [begin(1, [1])], "deltas": [delta(1, 2, [2**32 - 1])]}, "token 4294967295"),
        ({"begun": [begin(1, [1] * 200_000)]}, "200000 tokens"),
    ],
)
def test_what_no_engine_of_ours_sends_ends_the_connection(
    parts: dict[str, object], what: str
) -> None:
    drafter = Counting()
    worker = worker_of(lambda: drafter)
    engine, other = welcome(worker), welcome(worker)
    tell(worker, other, begun=[begin(1, [1])], deltas=[delta(1, 1)])
    answers = say(worker, engine, pb.ToWorker(round=pb.Round(number=1, **parts)))
    assert what in answers[0].refusal.reason
    assert len(drafter.live) == 1, "the other engine's"
    assert [list(b.tokens) for b in tell(worker, other, deltas=[delta(1, 2, [7])]).branches]


def test_a_round_before_the_welcome_and_another_protocol_are_refused() -> None:
    worker = worker_of(Counting)
    (answer,) = say(worker, worker.open(), pb.ToWorker(round=pb.Round(number=1)))
    assert "before the engine was welcome" in answer.refusal.reason
    hello = TARGET.hello()
    hello.hello.protocol = PROTOCOL + 1
    (answer,) = say(worker, worker.open(), hello)
    assert f"protocol {PROTOCOL + 1}" in answer.refusal.reason


def test_a_tokenizer_is_asked_for_once_it_is_needed() -> None:
    seen: list[Target] = []

    def make(target: Target) -> Drafter:
        seen.append(target)
        if target.tokenizer is None:
            raise NeedsTokenizer
        return Counting()

    worker = DraftWorker(make)
    target = dataclasses.replace(TARGET, vocabulary_digest=b"d", tokenizer='{"a": 1}')
    engine = worker.open()
    (answer,) = say(worker, engine, target.hello())
    assert answer.welcome.needs_tokenizer
    (answer,) = say(worker, engine, target.hello(with_tokenizer=True))
    assert answer.welcome.drafter == "counting"
    assert [each.tokenizer for each in seen] == [None, '{"a": 1}']


@pytest.mark.parametrize("tokenizer", [b"no zlib", zlib.compress(b"\xff"), zlib.compress(b"{}")])
def test_a_tokenizer_that_cannot_be_read_is_refused(tokenizer: bytes) -> None:
    def make(target: Target) -> Drafter:
        raise ConfigError("cannot be read")

    worker = DraftWorker(make)
    hello = TARGET.hello()
    hello.hello.tokenizer = tokenizer
    (answer,) = say(worker, worker.open(), hello)
    assert "cannot be read" in answer.refusal.reason
