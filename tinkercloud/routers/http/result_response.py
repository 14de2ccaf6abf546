"""Results as responses: large ones in pieces, as fast as their client takes them, and counted with
the bodies of requests until they are sent."""

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinkercloud.event_stream import until_gone
from tinkercloud.routers.http.body_budget import lease_of
from tinkercloud.services.results.result_answer import ResultAnswer

WHOLE_BYTES = 256 * 1024  # larger ones are sent in pieces of this size


def result_response(request: Request, answer: ResultAnswer) -> Response:
    """Raises TooManyRequests where answers and bodies fill their memory."""
    lease_of(request).grow_at_once(answer.memory_bytes)
    body = answer.body
    if not isinstance(body, bytes):
        return PiecesResponse(body, answer.content_type)
    if len(body) <= WHOLE_BYTES:
        return Response(body, media_type=answer.content_type)
    return PiecesResponse(_cut(body), answer.content_type, len(body))


class PiecesResponse(Response):
    """num_bytes None: of unknown length, so it goes out in chunks."""

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], content_type: str, num_bytes: int | None = None
    ):
        super().__init__(None, 200, media_type=content_type)
        del self.headers["content-length"]
        if num_bytes is not None:
            self.headers["content-length"] = str(num_bytes)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(OSError):  # the client is gone while something is sent
            await until_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _cut(body: bytes) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(body), WHOLE_BYTES):
        yield body[start : start + WHOLE_BYTES]
