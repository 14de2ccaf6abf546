"""HTTP with retries, and long polls for results."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import httpx
from pydantic import ValidationError

from tinker_gmi.bodies.requests import FutureRetrieveRequest
from tinker_gmi.bodies.responses import RequestFailedResponse
from tinker_gmi.bodies.wire_model import WireModel
from tinker_gmi.connection.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APITimeoutError,
    RateLimitError,
    RequestFailedError,
    status_error,
)

T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=WireModel)

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
POLL_TIMEOUT_S = 60.0  # servers hold a poll for about 30 s


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Delays double from `first_delay_s` to `max_delay_s`, less up to a quarter of jitter.

    After `give_up_s` seconds without a useful answer the last error is raised.
    quick_poll_s: the server did not hold a poll that it answered "pending" in less time; the next
    poll is then delayed, so that the client never polls in a busy loop.
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 10.0
    give_up_s: float = 300.0
    quick_poll_s: float = 1.0

    def delay_s(self, attempt: int) -> float:
        """The delay before retry number `attempt`, counted from 0."""
        delay = min(self.first_delay_s * 2.0 ** min(attempt, 32), self.max_delay_s)
        return delay * random.uniform(0.75, 1.0)


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request. It must be safe to repeat: retries send it again.

    patient: a 429 means "slow down" and does not count towards giving up.
    """

    method: str
    path: str
    body: bytes = b""
    content_type: str = JSON
    accept: str = JSON
    patient: bool = False
    timeout_s: float = 60.0
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


class Transport:
    """Sends calls to one server with one key."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        user_agent: str,
        http_transport: httpx.AsyncBaseTransport | None = None,
        retry: RetryPolicy | None = None,
    ):
        headers = {"User-Agent": user_agent} | ({"X-API-Key": api_key} if api_key else {})
        self.retry = retry or RetryPolicy()
        self.base_url = base_url.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=f"{self.base_url}/api/v1/",
            headers=headers,
            transport=http_transport,
            # A held poll occupies a connection; a limit here would starve submissions.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def post(
        self,
        path: str,
        body: WireModel,
        reply: type[ModelT],
        *,
        patient: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> ModelT:
        """POST a JSON body. Raises the errors of `errors`."""
        content = json.dumps(body.to_json_dict()).encode()
        call = Call("POST", path, content, patient=patient, headers=headers or {})
        return _parse(await self.send(call), reply)

    async def post_protobuf(self, path: str, body: bytes, reply: type[ModelT]) -> ModelT:
        return _parse(await self.send(Call("POST", path, body, content_type=PROTOBUF)), reply)

    async def get(self, path: str, reply: type[ModelT]) -> ModelT:
        return _parse(await self.send(Call("GET", path)), reply)

    async def send(self, call: Call) -> httpx.Response:
        """Retry connection errors, 408, 429 and 5xx; raise any other error status."""
        deadline = time.monotonic() + self.retry.give_up_s
        attempt = 0
        while True:
            outcome = await self._try(call)
            if isinstance(outcome, httpx.Response):
                return outcome
            backpressure = call.patient and isinstance(outcome, RateLimitError)
            if time.monotonic() >= deadline and not backpressure:
                raise outcome
            await asyncio.sleep(self.retry.delay_s(attempt))
            attempt += 1

    async def send_once(self, call: Call) -> httpx.Response:
        """Without retries."""
        outcome = await self._try(call)
        if isinstance(outcome, httpx.Response):
            return outcome
        raise outcome

    async def _try(self, call: Call) -> httpx.Response | APIError:
        """A success, or an error worth a retry; raises all other errors."""
        try:
            response = await self._request(call)
        except httpx.TimeoutException as error:
            return APITimeoutError(f"{call.path}: no answer in time ({error!r})")
        except httpx.TransportError as error:
            return APIConnectionError(f"{call.path}: {error!r}")
        if response.is_success:
            return response
        failure = status_error(response.status_code, body_of(response))
        if response.headers.get("x-should-retry") == "false":
            raise failure
        if response.status_code in (408, 429) or response.status_code >= 500:
            return failure
        raise failure

    async def _request(self, call: Call) -> httpx.Response:
        headers = {"Content-Type": call.content_type, "Accept": call.accept, **call.headers}
        if call.patient:
            headers["X-Tinker-Sampling-Backpressure"] = "1"
        return await self._client.request(
            call.method,
            call.path,
            content=call.body or None,
            headers=headers,
            timeout=call.timeout_s,
        )

    async def retrieve(
        self, request_id: str, decode: Callable[[httpx.Response], T], *, protobuf: bool = False
    ) -> T:
        """Poll until the future is done. Raises RequestFailedError when it failed."""
        body = json.dumps(FutureRetrieveRequest(request_id=request_id).to_json_dict()).encode()
        accept = PROTOBUF if protobuf else JSON
        call = Call("POST", "retrieve_future", body, accept=accept, timeout_s=POLL_TIMEOUT_S)
        last_answer = time.monotonic()
        attempt = 0
        while True:
            poll_start = time.monotonic()
            response = await self._poll(call, last_answer)
            if response is not None and not _is_pending(response):
                return _final(response, request_id, decode)
            now = time.monotonic()
            last_answer = now if response is not None else last_answer
            held = response is not None and now - poll_start >= self.retry.quick_poll_s
            if held:
                attempt = 0
                continue
            await asyncio.sleep(self.retry.delay_s(attempt) / (10 if response is not None else 1))
            attempt += 1

    async def _poll(self, call: Call, last_answer: float) -> httpx.Response | None:
        """An answer (408 too), or None for a transient error."""
        try:
            response = await self._request(call)
        except httpx.TransportError as error:
            if time.monotonic() - last_answer > self.retry.give_up_s:
                raise APIConnectionError(f"no answer from the server: {error!r}") from error
            return None
        if response.is_success or response.status_code == 408:
            return response
        failure = status_error(response.status_code, body_of(response))
        transient = response.status_code == 429 or response.status_code >= 500
        if not transient or time.monotonic() - last_answer > self.retry.give_up_s:
            raise failure
        return None


def decoder(reply: type[ModelT]) -> Callable[[httpx.Response], ModelT]:
    """Decodes a JSON result."""
    return lambda response: _parse(response, reply)


def is_protobuf(response: httpx.Response) -> bool:
    return PROTOBUF in response.headers.get("content-type", "")


def _json_object(response: httpx.Response) -> dict[str, Any]:
    """Empty for protobuf and for anything but an object."""
    body = None if is_protobuf(response) else body_of(response)
    return cast("dict[str, Any]", body) if isinstance(body, dict) else {}


def _is_pending(response: httpx.Response) -> bool:
    if response.status_code == 408:
        return True
    return _json_object(response).get("type") == "try_again"


def _final(response: httpx.Response, request_id: str, decode: Callable[[httpx.Response], T]) -> T:
    body = _json_object(response)
    if "error" in body:
        failure = RequestFailedResponse.model_validate({**body, "error": str(body["error"])})
        raise RequestFailedError(failure.error, request_id, failure.category)
    return decode(response)


def _parse(response: httpx.Response, reply: type[ModelT]) -> ModelT:
    try:
        return reply.model_validate_json(response.content or b"{}")
    except ValidationError as error:
        raise APIResponseValidationError(
            f"the answer of {response.request.url.path} is not a {reply.__name__}: {error}"
        ) from error


def body_of(response: httpx.Response) -> Any:
    """The JSON of an answer, or its text where it is none."""
    try:
        return response.json()
    except ValueError:
        return response.text
