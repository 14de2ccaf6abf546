"""Answers of the middleware, which has no response classes."""

import json
from collections.abc import Mapping

from starlette.types import Send

from tinkercloud.routers.http.error_forms import error_answer


async def refuse(
    send: Send, path: str, status: int, text: str, more_headers: Mapping[str, str] | None = None
) -> None:
    # Never without a body: clients take an empty 400 for a proxy's fault and retry it (wire
    # specification, section 0).
    status, content = error_answer(path, status, text)
    body = json.dumps(content).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.encode(), value.encode()) for name, value in (more_headers or {}).items()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
