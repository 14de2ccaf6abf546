"""A target worker: what clients send it, what it refuses, what it keeps."""

import time

import numpy as np
import pytest

from tests.speculative.pipeline.scripted import EOS, MODEL, VOCAB, ScriptedEngine, plain
from tinkercloud.speculative.remote import draft_pb2
from tinkercloud.speculative.remote import target_pb2 as pb
from tinkercloud.speculative.remote.target_messages import PROTOCOL
from tinkercloud.speculative.remote.target_worker import (
    ClientConnection,
    TargetLimits,
    TargetWorker,
)

PARAMS = draft_pb2.Params(seed=3, temperature=1.0, top_k=-1, top_p=1.0)
PROMPT = [5, 6, 7]


class Client:
    """A connection to a worker in this process, and what came back."""

    def __init__(self, worker: TargetWorker, *, greets: bool = True):
        self.worker, self.connection = worker, worker.open()
        if greets:
            self.say(hello=pb.Hello(protocol=PROTOCOL))

    def say(self, **message: object) -> "pb.FromTarget | None":
        self.worker.receive(self.connection, pb.ToTarget(**message))
        while self.worker.step():
            pass
        return None if self.connection.outgoing.empty() else self.connection.outgoing.get()

    def open(self, number: int) -> None:
        assert self.say(open=pb.Open(id=number, params=PARAMS)) is None

    def verify(self, number: int, length: int, **fields: object) -> pb.FromTarget:
        answer = self.say(verify=pb.Verify(id=number, number=9, length=length, **fields))
        assert answer is not None
        return answer


def worker_of(engine: ScriptedEngine, **limits: float) -> TargetWorker:
    return TargetWorker(MODEL, engine, TargetLimits(**limits))


def test_what_was_said_becomes_the_session_s_and_travels_once() -> None:
    client = Client(worker_of(ScriptedEngine()))
    client.open(1)
    first = client.verify(1, 3, tokens=PROMPT, max_tokens=4).verdict
    assert first.tokens == plain(PROMPT, 3, 4)[0]
    assert first.num_accepted == 0
    expected = plain(PROMPT, 3, 8)[0]
    second = client.verify(1, 7, drafted=[*expected[4:6], (expected[6] + 1) % VOCAB]).verdict
    assert second.tokens == expected[4:7]
    assert second.num_accepted == 2
    assert np.allclose(second.logprobs, plain(PROMPT, 3, 8)[1][4:7])
    third = client.verify(1, 12, tokens=[1, 2], max_tokens=2).verdict
    assert third.tokens == plain([*PROMPT, *expected[:7], 1, 2], 3, 2)[0]


def test_of_a_tree_the_longest_verdict_counts() -> None:
    engine = ScriptedEngine()
    client = Client(worker_of(engine))
    client.open(1)
    right = plain(PROMPT, 3, 6)[0]
    wrong = [(token + 1) % VOCAB for token in right]
    drafted = [wrong[0], right[0], wrong[1], right[1], right[2]]
    verdict = client.verify(1, 3, tokens=PROMPT, drafted=drafted, parents=[-1, -1, 1, 1, 3]).verdict
    assert verdict.tokens == right[:4]
    assert verdict.num_accepted == 3
    assert engine.passes == [3]


def test_an_end_of_sequence_is_told() -> None:
    seed = next(s for s in range(1000) if plain(PROMPT, s, 3)[0][-1] == EOS)
    client = Client(worker_of(ScriptedEngine()))
    params = draft_pb2.Params(seed=seed, temperature=1.0, top_k=-1, top_p=1.0)
    client.say(open=pb.Open(id=1, params=params))
    verdict = client.verify(1, 3, tokens=PROMPT, max_tokens=9).verdict
    assert verdict.has_stopped
    assert verdict.tokens[-1] == EOS


def test_a_session_that_is_not_there_is_gone_not_refused() -> None:
    client = Client(worker_of(ScriptedEngine()))
    failure = client.verify(8, 3, tokens=PROMPT).failure
    assert failure.is_gone
    client.open(8)
    assert client.verify(8, 3, tokens=PROMPT, max_tokens=1).verdict.tokens


def test_the_session_that_was_used_longest_ago_is_forgotten() -> None:
    worker = worker_of(ScriptedEngine(), num_sessions=2)
    client = Client(worker)
    for number in (1, 2):
        client.open(number)
        client.verify(number, 3, tokens=PROMPT, max_tokens=1)
    client.verify(1, 4, max_tokens=1)
    client.open(3)
    assert worker.counts["evicted"] == 1
    assert client.verify(2, 4, max_tokens=1).failure.is_gone
    assert not client.verify(1, 5, max_tokens=1).failure.is_gone


def test_idle_sessions_are_forgotten() -> None:
    worker = worker_of(ScriptedEngine(), idle_s=0.0)
    client = Client(worker)
    client.open(1)
    client.verify(1, 3, tokens=PROMPT, max_tokens=1)
    worker.step()
    assert worker.stats()["sessions"] == 0
    assert worker.counts["expired"] == 1


def test_a_worker_that_always_has_work_forgets_too() -> None:
    worker = worker_of(ScriptedEngine(), idle_s=0.05)
    idle, active = Client(worker), Client(worker)
    for client in (idle, active):
        client.open(1)
    length, new, end_s = len(PROMPT), PROMPT, time.monotonic() + 0.3
    while time.monotonic() < end_s:
        round_ = pb.Verify(id=1, number=1, length=length, tokens=new, max_tokens=1)
        worker.receive(active.connection, pb.ToTarget(verify=round_))
        assert worker.step()
        assert active.connection.outgoing.get().verdict.tokens
        length, new = length + 2, [8]
        time.sleep(0.005)
    assert worker.counts["expired"] == 1
    assert idle.verify(1, 3, tokens=PROMPT).failure.is_gone


def test_ends_and_lost_connections_cancel_what_is_computed() -> None:
    engine = ScriptedEngine(is_held=True)
    worker = worker_of(engine)
    clients = [Client(worker), Client(worker)]
    for client in clients:
        client.open(1)
        assert client.say(verify=pb.Verify(id=1, number=1, length=3, tokens=PROMPT)) is None
    assert len(engine.jobs) == 2
    clients[0].say(end=pb.End(id=1))
    assert len(engine.jobs) == 1
    worker.receive(clients[1].connection, None)
    worker.step()
    assert not engine.jobs
    assert worker.stats()["sessions"] == 0
    assert clients[1].connection.outgoing.get() is None


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"length": 4, "tokens": PROMPT}, "has 0 tokens"),
        ({"length": 0}, "0 tokens"),
        ({"length": 3, "tokens": [1, 2, VOCAB]}, f"token {VOCAB}"),
        ({"length": 3, "tokens": PROMPT, "drafted": [VOCAB]}, f"token {VOCAB}"),
        ({"length": 3, "tokens": PROMPT, "drafted": [1] * 129}, "129 drafted tokens of 128"),
        ({"length": 3, "tokens": PROMPT, "drafted": [1, 2], "parents": [0, 0]}, "the parent 0"),
    ],
)
def test_hostile_rounds_end_the_connection_with_a_reason(
    fields: dict[str, object], what: str
) -> None:
    engine = ScriptedEngine()
    client = Client(worker_of(engine))
    client.open(1)
    answer = client.say(verify=pb.Verify(id=1, number=1, **fields))
    assert answer is not None
    assert what in answer.refusal.reason
    assert client.connection.outgoing.get() is None
    assert not engine.jobs
    assert client.worker.stats()["sessions"] == client.worker.stats()["connections"] == 0


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"hello": pb.Hello(protocol=99)}, "protocol 99"),
        ({"open": pb.Open(id=1, params=PARAMS)}, "before the client was welcome"),
        ({}, "before the client was welcome"),
    ],
)
def test_whoever_does_not_greet_is_refused(message: dict[str, object], what: str) -> None:
    client = Client(worker_of(ScriptedEngine()), greets=False)
    answer = client.say(**message)
    assert answer is not None
    assert what in answer.refusal.reason


def test_a_second_round_and_a_second_session_of_a_number_are_refused() -> None:
    client = Client(worker_of(ScriptedEngine(is_held=True)))
    client.open(1)
    assert client.say(verify=pb.Verify(id=1, number=1, length=3, tokens=PROMPT)) is None
    answer = client.say(verify=pb.Verify(id=1, number=2, length=3))
    assert answer is not None
    assert "a round already" in answer.refusal.reason
    other = Client(worker_of(ScriptedEngine()))
    other.open(1)
    answer = other.say(open=pb.Open(id=1, params=PARAMS))
    assert answer is not None
    assert "is open" in answer.refusal.reason


def test_a_client_that_does_not_read_is_dropped() -> None:
    worker = worker_of(ScriptedEngine())
    connection: ClientConnection = worker.open()
    for _ in range(200):
        worker.receive(connection, pb.ToTarget(hello=pb.Hello(protocol=PROTOCOL)))
    while worker.step():
        pass
    assert worker.stats()["connections"] == 0
