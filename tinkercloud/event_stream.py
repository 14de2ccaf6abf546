"""Answers that take long: ended when their client goes away, kept alive while it waits."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinkercloud.errors import ServerFault, TinkercloudError

logger = logging.getLogger(__name__)

HEARTBEAT_S = 10.0  # below the minute or so after which proxies give a silent connection up
CLIENT_GONE = 499  # nobody reads it; nginx logs such requests by this number
DEFECT = "the server failed on this request in a way that it should not; see the server's log"
_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold the events back
}

T = TypeVar("T")


def server_sent(body: object, event: str | None = None) -> bytes:
    """One event with a JSON body."""
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {json.dumps(body, allow_nan=False)}\n\n".encode()


class EventStream(Response):
    """Server-sent events. failed: the events for an error underway. heartbeat: what is sent when
    nothing else was for HEARTBEAT_S."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        failed: Callable[[TinkercloudError], bytes],
        heartbeat: bytes = b": still here\n\n",
    ):
        super().__init__(None, 200, _HEADERS, "text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._failed = failed
        self._heartbeat = heartbeat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What fails before the first event is answered as any other error is, with its status."""
        with suppress(OSError):  # the client is gone while something is sent
            await until_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        has_started = False
        try:
            async with aclosing(_gathered(self._events, self._heartbeat)) as pieces:
                async for piece in pieces:
                    if not has_started:
                        start = {"type": "http.response.start", "status": self.status_code}
                        await send({**start, "headers": self.raw_headers})
                        has_started = True
                    await _send_body(send, piece, more=True)
        except OSError:
            raise
        except TinkercloudError as error:
            if not has_started:
                raise
            await _send_body(send, self._failed(error), more=True)
        except Exception:  # whatever a backend may throw: the client must see that it failed
            if not has_started:
                raise
            logger.exception("a stream failed")
            await _send_body(send, self._failed(ServerFault(DEFECT)), more=True)
        await _send_body(send, b"", more=False)


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _gathered(
    events: AsyncGenerator[bytes, None], heartbeat: bytes
) -> AsyncGenerator[bytes, None]:
    """What came since the last piece, as one: a step of the engine brings events of many samples,
    and to send them one by one takes longer than to make them."""
    came: list[bytes] = []
    news = asyncio.Event()

    async def read() -> None:
        async for event in events:
            came.append(event)
            news.set()

    reader = asyncio.ensure_future(read())
    reader.add_done_callback(lambda _: news.set())
    try:
        while came or not reader.done():
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await news.wait()
            except TimeoutError:
                yield heartbeat
                continue
            news.clear()
            if came:
                piece = b"".join(came)
                came.clear()
                yield piece
        await reader  # raises what ended it
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await events.aclose()


async def drain(events: AsyncGenerator[object, None]) -> None:
    """To their end: of an answer that is sent whole."""
    async with aclosing(events):
        async for _ in events:
            pass


async def while_connected(request: Request, work: Awaitable[Response]) -> Response:
    """The work's answer; the work is cancelled when its client goes away."""
    response = await until_gone(request.receive, work)
    return Response(status_code=CLIENT_GONE) if response is None else response


async def until_gone(receive: Receive, work: Awaitable[T]) -> T | None:
    """The work's result, or None where its client went away before: the work is then cancelled.

    The body of the request must have been read."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait([task, watcher], return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for unfinished in (task, watcher):
            unfinished.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
