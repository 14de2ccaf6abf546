"""The body of a request: read, within limits, and decompressed before any route is looked up."""

import asyncio
import io
from collections.abc import AsyncIterator

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinkercloud.errors import PayloadTooLarge, UserError
from tinkercloud.routers.deps import USER_KEY
from tinkercloud.routers.http.body_budget import LEASE_KEY, BodyBudget, BodyLease
from tinkercloud.routers.http.decompression import MAX_WINDOW_BYTES, STEP_BYTES, Inflater
from tinkercloud.routers.http.error_forms import retry_headers
from tinkercloud.routers.http.json_route import BODY_KEY
from tinkercloud.routers.http.refusal import refuse


class BodyMiddleware:
    """Reads the body within limits and hands it on decompressed. What it takes of the budget, and
    what its answer does, is given back when the request has been answered."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, budget: BodyBudget):
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lease = self._budget.lease(scope.get(USER_KEY, ""))  # signed links have no user, nor a body
        scope[LEASE_KEY] = lease
        try:
            if scope["method"] in ("GET", "HEAD"):
                await self._app(scope, receive, send)
                return
            body = await self._taken(scope, receive, send, lease)
            if body is None:
                return
            headers = MutableHeaders(scope=scope)
            del headers["content-encoding"]
            headers["content-length"] = str(len(body))
            scope[BODY_KEY] = body
            await self._app(scope, _replay(body, receive), send)
        finally:
            lease.release()

    async def _taken(
        self, scope: Scope, receive: Receive, send: Send, lease: BodyLease
    ) -> bytes | None:
        """None: it was refused, or the client went away."""
        try:
            return await self._body(Headers(scope=scope), receive, lease)
        except ClientDisconnect:
            return None
        except UserError as error:
            more = retry_headers(error)
            await refuse(send, scope["path"], error.status, str(error), more)
            return None

    async def _body(self, headers: Headers, receive: Receive, lease: BodyLease) -> bytes:
        declared = headers.get("content-length", "0")
        self._check_size(int(declared) if declared.isdecimal() else 0)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("", "identity"):
            return await self._plain(receive, lease)
        return await self._inflated(Inflater(encoding), receive, lease)

    async def _plain(self, receive: Receive, lease: BodyLease) -> bytes:
        body = io.BytesIO()  # its bytes are handed out without a copy
        async for piece in _pieces(receive):
            self._check_size(body.tell() + len(piece))
            await lease.grow(len(piece))
            body.write(piece)
        return body.getvalue()

    async def _inflated(self, inflater: Inflater, receive: Receive, lease: BodyLease) -> bytes:
        """The compressed bytes are not kept: each piece is inflated as it comes."""
        body = io.BytesIO()
        num_bytes = 0
        async for piece in _pieces(receive):
            if num_bytes == 0 and piece:
                await lease.grow(MAX_WINDOW_BYTES)
            num_bytes += len(piece)
            self._check_size(num_bytes)
            inflater.feed(piece)
            while inflater.has_input:
                await lease.grow(STEP_BYTES)  # first: a bomb must not come to its full size
                plain = await asyncio.to_thread(inflater.step)
                lease.shrink(STEP_BYTES - len(plain))
                self._check_size(body.tell() + len(plain))
                body.write(plain)
        if num_bytes:
            if not inflater.is_complete:
                raise UserError("the compressed body ends too early")
            lease.shrink(MAX_WINDOW_BYTES)
        return body.getvalue()

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            raise PayloadTooLarge(f"the body exceeds {self._max_body_bytes} bytes")


async def _pieces(receive: Receive) -> AsyncIterator[bytes]:
    """Of the body, as they come. Raises ClientDisconnect."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        yield message.get("body", b"")
        more = message.get("more_body", False)


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
