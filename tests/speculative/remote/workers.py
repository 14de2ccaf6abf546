"""Draft workers without a network: the worker itself, and a link that a test can spoil."""

import random
from collections import deque
from collections.abc import Callable

from tinkercloud.speculative.drafters.drafter import Drafter
from tinkercloud.speculative.remote import draft_pb2 as pb
from tinkercloud.speculative.remote.link import LinkUser
from tinkercloud.speculative.remote.messages import Target
from tinkercloud.speculative.remote.worker import DraftWorker, EngineConnection, WorkerLimits

TARGET = Target("tiny", b"", 260)


class LocalLink:
    """To a worker in this process. Each message is handled when it is sent, so that answers are
    there at once."""

    def __init__(self, worker: DraftWorker, name: str = "local", target: Target = TARGET):
        self.name, self.worker, self._target = name, worker, target
        self._user: LinkUser | None = None
        self._connection: EngineConnection | None = None
        self.dropped: list[str] = []

    def start(self, user: LinkUser) -> None:
        self._user = user
        self.connect()

    def connect(self) -> None:
        self._connection = self.worker.open()
        self.worker.receive(self._connection, self._target.hello())
        self.pump()

    def disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            assert self._user is not None
            self.worker.receive(connection, None)
            self.worker.step()
            self._user.closed(self)

    def send(self, message: pb.Round) -> bool:
        if self._connection is None:
            return False
        self.worker.receive(self._connection, pb.ToWorker.FromString(_packed(message)))
        self.pump()
        return True

    def push(self, message: pb.Weights) -> bool:
        if self._connection is None:
            return False
        self.worker.receive(self._connection, pb.ToWorker(weights=message))
        self.worker.step()
        self.deliver()
        return True

    def drop(self, reason: str) -> None:
        self.dropped.append(reason)

    def close(self) -> None:
        self.disconnect()

    def pump(self) -> None:
        """Everything that the worker has to do, and to say."""
        while self.worker.step():
            pass
        self.deliver()

    def deliver(self) -> None:
        assert self._connection is not None and self._user is not None
        while not self._connection.outgoing.empty():
            message = self._connection.outgoing.get()
            if message is None:
                self._connection = None
                self._user.closed(self)
                return
            if message.HasField("welcome"):
                self._user.opened(self)
            elif message.HasField("drafts"):
                self._user.received(self, message.drafts)


class FaultyLink(LocalLink):
    """Delays, loses, doubles and garbles messages, in both directions, dies and comes back."""

    def __init__(self, worker: DraftWorker, seed: int, name: str = "faulty"):
        super().__init__(worker, name)
        self._random = random.Random(seed)
        self._coins = {
            fault: self._random.choice([0.0, 0.05, 0.3])
            for fault in ("late", "lost", "doubled", "garbled", "dies", "slow")
        }
        self._held: deque[pb.Drafts] = deque()
        self._back_in = 0
        self.faults = 0

    def send(self, message: pb.Round) -> bool:
        if self._connection is None:
            self._back_in -= 1
            if self._back_in <= 0:
                self.connect()
            return True
        if self._happens("dies"):
            self.disconnect()
            self._held.clear()
            self._back_in = self._random.randint(1, 6)
            return True
        if self._happens("lost"):
            return True
        for _ in range(1 + self._happens("doubled")):
            self.worker.receive(self._connection, pb.ToWorker(round=message))
        self.pump()
        return True

    def pump(self) -> None:
        while not self._happens("slow") and self.worker.step():
            pass
        self.deliver()

    def deliver(self) -> None:
        assert self._user is not None
        connection = self._connection
        while connection is not None and not connection.outgoing.empty():
            message = connection.outgoing.get()
            if message is None:
                self._connection = None
                self._back_in = self._random.randint(1, 6)
                self._user.closed(self)
                return
            if message.HasField("welcome"):
                self._user.opened(self)
            elif message.HasField("drafts") and not self._happens("lost"):
                self._held.append(self._garbled(message.drafts))
        while self._held and not self._happens("late"):
            self._user.received(self, self._held.popleft())

    def _happens(self, fault: str) -> bool:
        happens = self._random.random() < self._coins[fault]
        self.faults += happens
        return happens

    def _garbled(self, drafts: pb.Drafts) -> pb.Drafts:
        """Still a message, with whatever numbers a hostile worker would write."""
        if not self._happens("garbled"):
            return drafts
        whatever = pb.Drafts(round=(drafts.round + self._random.choice([-1, 0, 1, 2**40])) % 2**64)
        for message in drafts.branches:
            tokens = [self._random.choice([0, 7, 259, 260, 2**31, 2**32 - 1]) for _ in range(9)]
            kept = list(message.tokens) if self._random.random() < 0.5 else tokens
            whatever.branches.append(
                pb.Branch(
                    id=message.id + self._random.choice([0, 0, 1, 2**50]),
                    base=max(0, message.base + self._random.choice([-3, -1, 0, 1, 9])),
                    tokens=kept,
                    confidences=bytes(self._random.randrange(256) for _ in kept),
                )
            )
        whatever.forgotten.extend(self._random.randrange(5) for _ in range(2))
        return whatever


def worker_of(make: Callable[[], Drafter], limits: WorkerLimits | None = None) -> DraftWorker:
    drafter = make()
    return DraftWorker(lambda _: drafter, limits)


def _packed(message: pb.Round) -> bytes:
    return pb.ToWorker(round=message).SerializeToString()
