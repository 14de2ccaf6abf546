"""What a draft model learns at an engine reaches its workers."""

from collections.abc import Sequence

import pytest

from tests.speculative.remote.test_remote_drafter import begun, tokens_of
from tests.speculative.remote.test_worker import Counting, begin, delta, say, tell, welcome
from tests.speculative.remote.workers import TARGET, LocalLink
from tinkercloud.errors import ConfigError
from tinkercloud.speculative.drafters.drafter import Draft, Drafter, Stream
from tinkercloud.speculative.remote import draft_pb2 as pb
from tinkercloud.speculative.remote import learned_weights
from tinkercloud.speculative.remote.learned_weights import LearnedWeights
from tinkercloud.speculative.remote.messages import Target
from tinkercloud.speculative.remote.remote_drafter import RemoteDrafter
from tinkercloud.speculative.remote.worker import DraftWorker

CONTENT = b"weights of a draft"


class Learned(Counting):
    """Says the length of what it learned."""

    def __init__(self, weights: LearnedWeights):
        super().__init__()
        self.says = len(weights.content)

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        return [Draft((self.says,) * most, (1.0,) * most) for _, most in requests]


class Learning:
    """A worker whose drafters learn, and what they learned."""

    def __init__(self) -> None:
        self.base = Counting()
        self.learned: list[Learned] = []
        self.refuses = False
        self.worker = DraftWorker(lambda _: self.base, learn=self._learn)

    def _learn(self, _target: Target, drafter: Drafter, weights: LearnedWeights) -> Drafter:
        if self.refuses:
            raise ConfigError("of another model")
        if isinstance(drafter, Learned):
            drafter.says = len(weights.content)
            return drafter
        self.learned.append(Learned(weights))
        return self.learned[-1]


def weights(content: bytes = CONTENT) -> LearnedWeights:
    return LearnedWeights(content, 2.0)


def test_drafts_follow_what_was_pushed_and_samples_go_on() -> None:
    learning = Learning()
    remote = RemoteDrafter([LocalLink(learning.worker)], 5.0, TARGET.vocab_size)
    one = begun(remote, [1, 2])
    assert tokens_of(remote, one) == (3, 4, 5)
    remote.push(weights())
    one.tokens.append(50)
    assert tokens_of(remote, one) == (len(CONTENT),) * 3
    assert not learning.base.live
    assert len(learning.learned[0].live) == 1
    assert remote.snapshot()["workers"]["local"]["weights"] == weights().short_digest
    remote.push(weights(CONTENT[:7]))
    one.tokens.append(51)
    assert tokens_of(remote, one) == (7, 7, 7)
    assert len(learning.learned) == 1, "the engine's own drafter is used again"
    remote.end(one)
    assert tokens_of(remote, begun(remote, [9], 1)) == (7, 7, 7)
    assert len(learning.learned[0].live) == 1


def test_a_worker_that_comes_back_gets_the_newest() -> None:
    learning = Learning()
    link = LocalLink(learning.worker)
    remote = RemoteDrafter([link], 5.0, TARGET.vocab_size)
    link.disconnect()
    remote.push(weights(b"old"))
    remote.push(weights())
    assert not learning.learned
    link.connect()
    assert tokens_of(remote, begun(remote, [1])) == (len(CONTENT),) * 3


def test_other_engines_keep_their_own() -> None:
    learning = Learning()
    first, second = (
        RemoteDrafter([LocalLink(learning.worker, name)], 5.0, TARGET.vocab_size)
        for name in ("a", "b")
    )
    first.push(weights())
    assert tokens_of(first, begun(first, [1])) == (len(CONTENT),) * 3
    assert tokens_of(second, begun(second, [1])) == (2, 3, 4)


def test_large_ones_travel_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_weights, "PIECE_BYTES", 5)
    messages = weights().messages()
    assert [len(message.piece) for message in messages] == [5, 5, 5, 3]
    learning = Learning()
    engine = welcome(learning.worker)
    for message in messages:
        assert not learning.learned
        say(learning.worker, engine, pb.ToWorker(weights=message))
    assert learning.learned[0].says == len(CONTENT)


def test_what_does_not_fit_is_left_and_drafts_go_on() -> None:
    learning = Learning()
    learning.refuses = True
    engine = welcome(learning.worker)
    tell(learning.worker, engine, begun=[begin(7, [1])], deltas=[delta(7, 1)])
    (message,) = weights().messages()
    say(learning.worker, engine, pb.ToWorker(weights=message))
    answer = tell(learning.worker, engine, number=2, deltas=[delta(7, 2, [8])])
    assert [list(b.tokens) for b in answer.branches] == [[9, 10, 11]]


@pytest.mark.parametrize("fault", ["digest", "size", "early"])
def test_what_is_not_what_it_says_ends_the_connection(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learning = Learning()
    engine = learning.worker.open() if fault == "early" else welcome(learning.worker)
    (message,) = weights().messages()
    if fault == "digest":
        message.digest = b"another"
    if fault == "size":
        monkeypatch.setattr(learned_weights, "MAX_BYTES", 5)
    (answer,) = say(learning.worker, engine, pb.ToWorker(weights=message))
    expected = {"digest": "of their digest", "size": "5 bytes", "early": "before the engine"}
    assert expected[fault] in answer.refusal.reason
    assert not learning.learned


def test_a_drafter_without_weights_goes_on_as_it_is() -> None:
    worker = DraftWorker(lambda _: Counting())
    remote = RemoteDrafter([LocalLink(worker)], 5.0, TARGET.vocab_size)
    remote.push(weights())
    assert tokens_of(remote, begun(remote, [1])) == (2, 3, 4)
