"""Polls for the results of acknowledged requests."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import httpx

from tinker_gmi.bodies.requests import FutureRetrieveRequest
from tinker_gmi.bodies.responses import RequestFailedResponse, TryAgainResponse
from tinker_gmi.connection.errors import APIConnectionError, RequestFailedError, status_error
from tinker_gmi.connection.transport import (
    JSON,
    PROTOBUF,
    Call,
    Transport,
    body_of,
    is_protobuf,
    is_transient,
)

T = TypeVar("T")

POLL_TIMEOUT_S = 60.0  # servers hold a poll for about 30 s


def _unheard(answer: TryAgainResponse) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Poll:
    """request_id: of the request whose result is awaited; type: its kind, for the server's
    records. protobuf: whether the result is. on_pending: hears each answer without a result."""

    request_id: str
    protobuf: bool = False
    type: str | None = None
    on_pending: Callable[[TryAgainResponse], None] = _unheard

    def call(self) -> Call:
        body = json.dumps(FutureRetrieveRequest(request_id=self.request_id).to_json_dict()).encode()
        return Call(
            "POST",
            "retrieve_future",
            body,
            accept=PROTOBUF if self.protobuf else JSON,
            timeout_s=POLL_TIMEOUT_S,
            headers={} if self.type is None else {"X-Tinker-Request-Type": self.type},
        )


async def retrieve(transport: Transport, poll: Poll, decode: Callable[[httpx.Response], T]) -> T:
    """Poll until the result is there. Raises RequestFailedError when the request failed."""
    call, retry = poll.call(), transport.retry
    last_answer = time.monotonic()
    attempt = 0
    while True:
        poll_start = time.monotonic()
        response = await _answer(transport, call, last_answer)
        if response is not None:
            pending = _pending(response, poll.request_id)
            if pending is None:
                return _final(response, poll.request_id, decode)
            poll.on_pending(pending)
        now = time.monotonic()
        last_answer = now if response is not None else last_answer
        if response is not None and now - poll_start >= retry.quick_poll_s:
            attempt = 0
            continue
        await asyncio.sleep(retry.delay_s(attempt) / (10 if response is not None else 1))
        attempt += 1


async def _answer(transport: Transport, call: Call, last_answer: float) -> httpx.Response | None:
    """An answer (408 too), or None for a transient error."""
    silent_s = time.monotonic() - last_answer
    try:
        response = await transport.request(call)
    except httpx.TransportError as error:
        if silent_s > transport.retry.give_up_s:
            raise APIConnectionError(f"no answer from the server: {error!r}") from error
        return None
    if response.is_success or response.status_code == 408:
        return response
    failure = status_error(response.status_code, body_of(response))
    if response.status_code == 402:
        if silent_s > transport.max_billing_pause_s:
            raise failure
        await asyncio.sleep(transport.retry.billing_pause_s)
        return None
    if not is_transient(response) or silent_s > transport.retry.give_up_s:
        raise failure
    return None


def _json_object(response: httpx.Response) -> Mapping[str, Any]:
    """Empty for protobuf and for anything but an object."""
    body = None if is_protobuf(response) else body_of(response)
    return cast("dict[str, Any]", body) if isinstance(body, dict) else {}


def _pending(response: httpx.Response, request_id: str) -> TryAgainResponse | None:
    body = _json_object(response)
    if response.status_code != 408 and body.get("type") != "try_again":
        return None
    state = body.get("queue_state")
    if state not in ("active", "paused_capacity", "paused_rate_limit"):
        return TryAgainResponse(request_id=request_id)
    reason = body.get("queue_state_reason")
    return TryAgainResponse(
        request_id=request_id,
        queue_state=state,
        queue_state_reason=None if reason is None else str(reason),
    )


def _final(response: httpx.Response, request_id: str, decode: Callable[[httpx.Response], T]) -> T:
    body = _json_object(response)
    if "error" in body:
        failure = RequestFailedResponse.model_validate({**body, "error": str(body["error"])})
        raise RequestFailedError(failure.error, request_id, failure.category)
    return decode(response)
