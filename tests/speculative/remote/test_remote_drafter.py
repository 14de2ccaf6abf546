"""Drafts of workers elsewhere: what is taken, how long it is waited for."""

import time
from collections.abc import Sequence

from tests.speculative.remote.test_worker import Counting
from tests.speculative.remote.workers import TARGET, LocalLink, worker_of
from tinkercloud.core.types import SamplingParams
from tinkercloud.speculative.drafters.drafter import Draft, Drafter, Stream
from tinkercloud.speculative.remote import draft_pb2 as pb
from tinkercloud.speculative.remote.link import LinkUser
from tinkercloud.speculative.remote.remote_drafter import (
    MAX_BRANCHES,
    MAX_LATE,
    MAX_UNASKED,
    RemoteDrafter,
)

WAIT_S = 0.3  # longer than a busy machine keeps a thread waiting


class SilentLink:
    """A worker that says what a test makes it say."""

    def __init__(self, name: str = "silent"):
        self.name = name
        self.sent: list[pb.Round] = []
        self.dropped: list[str] = []
        self.reads = True
        self.user: LinkUser | None = None

    def start(self, user: LinkUser) -> None:
        self.user = user
        user.opened(self)

    def send(self, message: pb.Round) -> bool:
        self.sent.append(message)
        return self.reads

    def push(self, message: pb.Weights) -> bool:
        return self.reads

    def drop(self, reason: str) -> None:
        self.dropped.append(reason)

    def close(self) -> None:
        pass

    def say(self, base: int, tokens: Sequence[int], number: int = 0, sample: int = 0) -> None:
        assert self.user is not None
        branch = pb.Branch(id=sample, base=base, tokens=tokens, confidences=bytes(len(tokens)))
        self.user.received(self, pb.Drafts(round=number, branches=[branch]))


def stream(tokens: Sequence[int], number: int = 0) -> Stream:
    params = SamplingParams(max_tokens=None, seed=3)
    return Stream(number, b"group", "version", 0, list(tokens), 1, params, 0)


def begun(drafter: Drafter, tokens: Sequence[int], number: int = 0) -> Stream:
    one = stream(tokens, number)
    drafter.begin(one)
    return one


def tokens_of(drafter: Drafter, one: Stream, most: int = 3) -> tuple[int, ...]:
    (draft,) = drafter.propose([(one, most)])
    return draft.tokens


def test_a_worker_s_draft_is_the_drafter_s_own() -> None:
    remote = RemoteDrafter([LocalLink(worker_of(Counting))], WAIT_S, TARGET.vocab_size)
    ones = [begun(remote, [1, 2], 0), begun(remote, [7], 1)]
    drafts = remote.propose([(ones[0], 3), (ones[1], 2)])
    expected = Counting().propose([(ones[0], 3), (ones[1], 2)])
    assert [d.tokens for d in drafts] == [d.tokens for d in expected]
    for found, right in zip(drafts, expected, strict=True):
        for a, b in zip(found.confidences, right.confidences, strict=True):
            assert abs(a - b) <= 0.5 / 255


def test_an_outcome_that_was_prepared_for_needs_no_answer() -> None:
    link = LocalLink(worker_of(Counting))
    remote = RemoteDrafter([link], WAIT_S, TARGET.vocab_size)
    one = begun(remote, [1, 2])
    assert tokens_of(remote, one) == (3, 4, 5)
    link.send = lambda message: True  # from now on the worker hears nothing
    one.tokens.extend([3, 4, 5, 6])  # the whole draft, and the token that the target adds
    assert tokens_of(remote, one) == (7, 8, 9)
    assert remote.counts["prepared"] == 1


def test_a_rejection_that_was_prepared_for_needs_no_answer() -> None:
    link = LocalLink(worker_of(Counting))
    remote = RemoteDrafter([link], WAIT_S, TARGET.vocab_size)
    one = begun(remote, [1, 2])
    assert tokens_of(remote, one) == (3, 4, 5)
    link.send = lambda message: True
    one.tokens.extend([3, 99])
    assert tokens_of(remote, one) == (100, 101, 102)


def test_a_late_answer_serves_where_it_still_fits() -> None:
    link = SilentLink()
    remote = RemoteDrafter([link], WAIT_S, TARGET.vocab_size)
    one = begun(remote, [1])
    assert tokens_of(remote, one) == ()
    one.tokens.extend([5, 6])
    link.say(1, [5, 6, 7, 8])
    assert tokens_of(remote, one) == (7, 8)
    one.tokens.extend([7])
    link.say(1, [5, 9, 9, 9])
    assert tokens_of(remote, one) == (8,)


def test_a_worker_that_does_not_answer_is_waited_for_a_few_times_only() -> None:
    link = SilentLink()
    remote = RemoteDrafter([link], WAIT_S, TARGET.vocab_size)
    one = begun(remote, [1])
    times = []
    for _ in range(MAX_LATE + 3):
        start = time.monotonic()
        assert tokens_of(remote, one) == ()
        times.append(time.monotonic() - start)
        one.tokens.append(1)
    assert sum(t >= WAIT_S for t in times) <= MAX_LATE + 1
    assert max(times[-2:]) < WAIT_S
    number = link.sent[-1].number
    link.say(len(one.tokens), [4, 5, 6], number + 1)
    one.tokens.append(4)
    assert tokens_of(remote, one) == (5, 6), "what it says is used all the same"


def test_one_in_time_is_waited_for_again() -> None:
    link = SilentLink()
    remote = RemoteDrafter([link], WAIT_S, TARGET.vocab_size)
    one = begun(remote, [1])
    for _ in range(MAX_LATE + 2):
        tokens_of(remote, one)
    assert not remote.snapshot()["workers"]["silent"]["waited_for"]

    def answer(message: pb.Round) -> bool:
        link.say(len(one.tokens), [2, 3], message.number)
        return True

    link.send = answer
    assert tokens_of(remote, one) == (2, 3)
    assert remote.snapshot()["workers"]["silent"]["waited_for"]


def test_the_first_valid_draft_of_several_workers_wins() -> None:
    silent, quick = SilentLink("silent"), LocalLink(worker_of(Counting), "quick")
    remote = RemoteDrafter([silent, quick], 30.0, TARGET.vocab_size)
    one = begun(remote, [1, 2])
    start = time.monotonic()
    assert tokens_of(remote, one) == (3, 4, 5)
    assert time.monotonic() - start < 5.0
    workers = remote.snapshot()["workers"]
    assert (workers["quick"]["taken"], workers["silent"]["taken"]) == (1, 0)


def test_an_answer_without_drafts_is_not_waited_beyond() -> None:
    remote = RemoteDrafter([LocalLink(worker_of(Drafter))], 30.0, TARGET.vocab_size)
    start = time.monotonic()
    assert tokens_of(remote, begun(remote, [1])) == ()
    assert time.monotonic() - start < 5.0


def test_a_connection_that_comes_back_knows_all_samples_again() -> None:
    link = LocalLink(worker_of(Counting))
    remote = RemoteDrafter([link], WAIT_S, TARGET.vocab_size)
    one = begun(remote, [1, 2])
    tokens_of(remote, one)
    link.disconnect()
    one.tokens.extend([50])
    assert tokens_of(remote, one) == ()
    link.connect()
    assert tokens_of(remote, one) == (51, 52, 53)


def test_a_flood_ends_the_connection_and_memory_is_bounded() -> None:
    link = SilentLink()
    remote = RemoteDrafter([link], WAIT_S, TARGET.vocab_size)
    begun(remote, [1])
    for i in range(MAX_UNASKED + 1):
        link.say(1, [i])
        link.say(1, [i] * 1000)
    assert link.dropped
    assert len(remote._branches[0]) <= MAX_BRANCHES
    assert remote.counts["invalid"] > 0


def test_tokens_that_the_target_has_not_are_no_draft() -> None:
    """Whoever verifies: a target worker would refuse its client for them."""
    link = SilentLink()
    remote = RemoteDrafter([link], WAIT_S, TARGET.vocab_size)
    one = begun(remote, [1])
    link.say(1, [2, TARGET.vocab_size])
    assert tokens_of(remote, one) == ()
    assert remote.counts["invalid"] == 1
    link.say(1, [2, TARGET.vocab_size - 1])
    assert tokens_of(remote, one) == (2, TARGET.vocab_size - 1)


def test_a_worker_that_does_not_read_is_dropped() -> None:
    link = SilentLink()
    remote = RemoteDrafter([link], WAIT_S, TARGET.vocab_size)
    link.reads = False
    one = begun(remote, [1])
    assert tokens_of(remote, one) == ()
    assert link.dropped
    num_sent = len(link.sent)
    assert tokens_of(remote, one) == ()
    assert len(link.sent) == num_sent


def test_what_is_sent_of_a_sample_that_ended_is_forgotten() -> None:
    worker = worker_of(Counting)
    remote = RemoteDrafter([LocalLink(worker)], WAIT_S, TARGET.vocab_size)
    one, other = begun(remote, [1, 2]), begun(remote, [3], 1)
    remote.propose([(one, 3), (other, 3)])
    remote.end(one)
    assert tokens_of(remote, other) == (4, 5, 6)
    assert worker.stats()["samples"] == 1


def test_drafts_of_other_drafts_are_no_longer_than_asked() -> None:
    link = SilentLink()
    remote = RemoteDrafter([link], WAIT_S, TARGET.vocab_size)
    one = begun(remote, [1])
    link.say(1, [2, 3, 4, 5])
    (draft,) = remote.propose([(one, 2)])
    assert draft == Draft((2, 3), (0.0, 0.0))
