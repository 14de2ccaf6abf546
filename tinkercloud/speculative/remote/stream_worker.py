"""What workers behind gRPC streams have in common: many connections, one thread that computes."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Full, Queue
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

MAX_WAITING = 64  # messages that a client has not read
LOOK_EVERY_S = 1.0  # for what nobody has used for long


@dataclass(eq=False)
class Connection:
    """A client. outgoing: what it is to be sent, and None at the end."""

    number: int
    outgoing: "Queue[Any]" = field(default_factory=lambda: Queue(MAX_WAITING))

    def send(self, message: Any) -> bool:
        """False where the client does not read: it is dropped."""
        try:
            self.outgoing.put_nowait(message)
        except Full:
            return False
        return True

    def end(self) -> None:
        """Also where the queue is full: what is in it has no reader any more."""
        while True:
            try:
                self.outgoing.put_nowait(None)
                return
            except Full:
                if self.outgoing.get_nowait() is None:
                    return


C = TypeVar("C", bound=Connection)


class StreamWorker(ABC, Generic[C]):
    """new: a connection with that number. idle_s: after which what was not used is forgotten.
    Subclasses compute in `step`, and clean up in `close`."""

    def __init__(self, new: Callable[[int], C], idle_s: float):
        self._new, self._idle_s = new, idle_s
        self._next_look_s = 0.0
        self._arrived = threading.Condition()
        self._inbox: deque[tuple[C, Any]] = deque()
        self._num_connections = 0
        self._open: set[C] = set()
        self._is_stopped = False

    # ---- called by the transport, from any thread

    def open(self) -> C:
        with self._arrived:
            self._num_connections += 1
            connection = self._new(self._num_connections)
            if self._is_stopped:
                connection.end()
            else:
                self._open.add(connection)
            return connection

    def receive(self, connection: C, message: Any) -> None:
        """None: the client has gone."""
        with self._arrived:
            self._inbox.append((connection, message))
            self._arrived.notify()

    def stop(self) -> None:
        with self._arrived:
            self._is_stopped = True
            self._arrived.notify()

    def stats(self) -> dict[str, int]:
        """Figures for the log."""
        with self._arrived:
            return {"connections": len(self._open)}

    # ---- the computing thread

    def run(self) -> None:
        """Until `stop`."""
        while not self._is_stopped:
            try:
                self.step(wait_s=1.0)
            except Exception:  # a defect: clients lose their state, not their worker
                logger.exception("a step failed; all clients begin anew")
                self._close_all()
        self._close_all()

    @abstractmethod
    def step(self, wait_s: float = 0.0) -> bool:
        """Something that is to be done, if there is or comes within that time; whether it was."""

    def close(self, connection: C) -> None:
        """What it kept is dropped, and its stream ends."""
        with self._arrived:
            self._open.discard(connection)
        connection.end()

    def _idle_before(self) -> float | None:
        """What was last used before that time is to be forgotten; None where it is too early to
        look again. For every step, since a worker may never be without work."""
        now = time.monotonic()
        if now < self._next_look_s:
            return None
        self._next_look_s = now + min(LOOK_EVERY_S, self._idle_s)
        return now - self._idle_s

    def _close_all(self) -> None:
        for connection in list(self._open):
            self.close(connection)

    def _take(self, wait_s: float) -> list[tuple[C, Any]]:
        """Messages of open connections."""
        with self._arrived:
            if not self._inbox and wait_s and not self._is_stopped:
                self._arrived.wait(wait_s)
            messages = list(self._inbox)
            self._inbox.clear()
        return messages
