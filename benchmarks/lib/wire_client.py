"""The Tinker API over bare sockets: this client costs a small part of what an HTTP library costs,
so that on shared cores the server is what is measured."""

import asyncio
import json
from collections import deque
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

JSON = "application/json"
PROTO = "application/x-protobuf"
PENDING = 408


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content_type: str
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Refused(ValueError):
    """An answer that is no success, with its status and the beginning of its text."""

    def __init__(self, answer: Answer):
        super().__init__(f"{answer.status}: {answer.body[:300].decode(errors='replace')}")
        self.status = answer.status


class Connection(asyncio.Protocol):
    """One kept-alive connection, one request at a time. ConnectionError when the server closes
    it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._received = bytearray()
        self._head: tuple[int, str, int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._head is None:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return
            self._head = _parsed_head(bytes(self._received[:end]))
            del self._received[: end + 4]
        status, content_type, length = self._head
        if len(self._received) < length:
            return
        body = bytes(self._received[:length])
        del self._received[:length]
        self._head = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(Answer(status, content_type, body))

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    async def request(self, message: bytes) -> Answer:
        if self._transport is None:
            raise ConnectionError("the connection is closed")
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        return await self._waiter

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


def _parsed_head(head: bytes) -> tuple[int, str, int]:
    """(status, content type, length). Our server says the length of all that is asked for here."""
    lines = head.split(b"\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in lines[1:])
    content_type = headers.get(b"content-type", b"").decode()
    return int(lines[0].split(b" ", 2)[1]), content_type, int(headers[b"content-length"])


class WireClient:
    """Requests over as many connections as are in flight at once, kept for the next ones."""

    def __init__(self, url: str, api_key: str = ""):
        address = urlsplit(url)
        assert address.hostname is not None
        self._address = (address.hostname, address.port)
        key = f"X-API-Key: {api_key}\r\n" if api_key else ""
        self._head = f" HTTP/1.1\r\nHost: {address.netloc}\r\n{key}"
        self._idle: deque[Connection] = deque()

    async def call(
        self, path: str, body: bytes = b"", content_type: str = JSON, accept: str = "*/*"
    ) -> Answer:
        """GET where there is no body, else POST."""
        head = f"GET {path}{self._head}Accept: {accept}\r\n\r\n"
        if body:
            head = (
                f"POST {path}{self._head}Accept: {accept}\r\nContent-Type: {content_type}\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
        connection = await self._connection()
        try:
            answer = await connection.request(head.encode() + body)
        except BaseException:  # cancelled too: an answer half read is nobody's
            connection.close()
            raise
        self._idle.append(connection)
        return answer

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, *self._address)
        return connection

    async def post(self, call: str, **body: Any) -> Any:
        """The answer of a JSON call. Raises Refused."""
        answer = await self.call(f"/api/v1/{call}", json.dumps(body).encode())
        if answer.status != 200:
            raise Refused(answer)
        return answer.json()

    async def retrieve(self, request_id: str, accept: str = JSON) -> Answer:
        """A future's result, asked for again while the server answers 408. Raises Refused."""
        body = b'{"request_id": "%s", "allow_metadata_only": false}' % request_id.encode()
        answer = Answer(PENDING, JSON, b"")
        while answer.status == PENDING:
            answer = await self.call("/api/v1/retrieve_future", body, accept=accept)
        failed = answer.content_type.startswith(JSON) and b'"error"' in answer.body
        if answer.status != 200 or failed:
            raise Refused(answer)
        return answer

    async def result(self, call: str, **body: Any) -> Any:
        """Of a call whose result is JSON."""
        request_id = (await self.post(call, **body))["request_id"]
        return (await self.retrieve(request_id)).json()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
