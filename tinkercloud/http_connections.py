"""Connections that a client keeps open without doing its part are closed, and there are not more
than there is room for. uvicorn itself waits for ever for the rest of a head or of a body, and for
a client to take its answer.

Not touched by any of that: requests that are here whole, such as held polls, and connections that
wait for their next request (uvicorn's keep-alive time is theirs).
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

BODY_BYTES_PER_S = 16 * 1024
"""Each so many bytes of a body give it one more second."""
BODY_CHECK_S = 1.0
DRAIN_BYTES = 8 * 1024 * 1024
"""Of a body that was answered unread. A connection that is closed under a client which still sends
takes the answer with it (RFC 9112, section 9.6), and SDKs send requests of 5 MB."""
DRAIN_S = 10.0
WRITE_STALL_S = 60.0
"""An answer of which a client takes nothing for so long is dropped."""

_NO_ROOM = b'{"detail": "this server has no room for connections now"}'
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(_NO_ROOM), _NO_ROOM)
)
_TOO_SLOW = b'{"detail": "the body of this request came too slowly (body_timeout_s)"}'


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Times in seconds; body_timeout_s: without the seconds that bytes give."""

    max_connections: int
    head_timeout_s: float
    body_timeout_s: float


class Connections:
    """All of a server, and which of them are closed first for new ones."""

    def __init__(self, limits: ConnectionLimits):
        self.limits = limits
        self._num_open = 0
        # Dicts for their order: the oldest comes first.
        self._half_open: dict[LimitedProtocol, None] = {}
        self._idle: dict[LimitedProtocol, None] = {}

    def opened(self, connection: "LimitedProtocol") -> bool:
        """False: there is no room for it, as all others have requests under way."""
        self._num_open += 1
        if self._num_open > self.limits.max_connections:
            oldest = next(iter(self._half_open or self._idle), None)
            if oldest is None:
                return False
            self.busy(oldest)  # it is not chosen again
            oldest.transport.abort()
        self._half_open[connection] = None
        return True

    def closed(self, connection: "LimitedProtocol") -> None:
        self._num_open -= 1
        self.busy(connection)

    def half_open(self, connection: "LimitedProtocol") -> None:
        """A part of a head is here."""
        self._idle.pop(connection, None)
        self._half_open.setdefault(connection)

    def busy(self, connection: "LimitedProtocol") -> None:
        self._half_open.pop(connection, None)
        self._idle.pop(connection, None)

    def idle(self, connection: "LimitedProtocol") -> None:
        self._idle[connection] = None


class LimitedProtocol(H11Protocol):
    """One connection. Made by uvicorn, with `connections` besides its own arguments."""

    def __init__(self, *args: Any, connections: Connections, **options: Any):
        super().__init__(*args, **options)
        self._all = connections
        self._limits = connections.limits
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._body_bytes = 0
        self._body_waited_s = 0.0
        self._unwritten_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as uvicorn's
        super().connection_made(transport)
        if not self._all.opened(self):
            transport.write(_FULL)
            transport.close()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.closed(self)
        self._stop_head_timer()
        self._stop_body_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        state = self.conn.their_state
        if state is h11.IDLE:
            self._stop_body_timer()
            self._all.half_open(self)
            if self._head_timer is None:
                self._await_head()
            return
        self._stop_head_timer()
        self._all.busy(self)
        if state is not h11.SEND_BODY:
            self._stop_body_timer()
            return
        self._body_bytes += len(data)
        if self._body_timer is None:
            self._await_body()
        elif self.conn.our_state is h11.DONE and self._body_bytes > DRAIN_BYTES:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.SEND_BODY:  # answered before its body was there
            self._stop_body_timer()
            self._body_timer = self.loop.call_later(DRAIN_S, self.transport.close)
        elif self.conn.their_state is h11.IDLE:
            self._all.idle(self)

    # heads

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # bodies

    def _await_body(self) -> None:
        self._body_timer = self.loop.call_later(BODY_CHECK_S, self._check_body)

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        self._body_bytes = 0
        self._body_waited_s = 0.0

    def _check_body(self) -> None:
        if not self.flow.read_paused:  # else it is the server that lets the client wait
            self._body_waited_s += BODY_CHECK_S
        allowed_s = self._limits.body_timeout_s + self._body_bytes / BODY_BYTES_PER_S
        if self._body_waited_s <= allowed_s:
            self._await_body()
            return
        self._body_timer = None
        if self.conn.our_state is h11.SEND_RESPONSE:
            self._answer_408()
        self.transport.close()

    def _answer_408(self) -> None:
        self.cycle.disconnected = True  # the application reads the end of the connection
        self.cycle.message_event.set()
        length = (b"content-length", str(len(_TOO_SLOW)).encode())
        headers = [(b"content-type", b"application/json"), length, (b"connection", b"close")]
        answer = h11.Response(status_code=408, headers=headers, reason=b"Request Timeout")
        for event in (answer, h11.Data(data=_TOO_SLOW), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))

    # answers

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():  # it is closed once that is written
            self._watch_writing()

    def _watch_writing(self) -> None:
        if self._write_timer is None:
            self._unwritten_bytes = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(WRITE_STALL_S, self._check_writing)

    def _check_writing(self) -> None:
        self._write_timer = None
        unwritten_bytes = self.transport.get_write_buffer_size()
        if unwritten_bytes and unwritten_bytes == self._unwritten_bytes:
            self.transport.abort()
        elif unwritten_bytes:
            self._watch_writing()
