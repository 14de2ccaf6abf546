"""HTTP with retries."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from tinker_gmi.bodies.wire_model import WireModel
from tinker_gmi.connection.credentials import Credentials
from tinker_gmi.connection.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APITimeoutError,
    BillingError,
    RateLimitError,
    status_error,
)
from tinker_gmi.connection.outage import Outage
from tinker_gmi.connection.retries import RetryPolicy, retry_after_s
from tinker_gmi.connection.zstd import zstd_frame

ModelT = TypeVar("ModelT", bound=WireModel)

logger = logging.getLogger("tinker_gmi")

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
IDEMPOTENCY_KEY = "X-Idempotency-Key"
# What these raise is raised at once: there is no job yet that could be paused.
UNPAUSED = ("auth/token", "create_session", "create_sampling_session", "create_model")


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
        self.retry = retry or RetryPolicy()
        self.credentials = Credentials(api_key)
        self.max_billing_pause_s = self.retry.max_billing_pause_s
        self.base_url = base_url.rstrip("/")
        self._outage = Outage(self.base_url, self.retry.give_up_s)
        self._client = httpx.AsyncClient(
            base_url=f"{self.base_url}/api/v1/",
            headers={"User-Agent": user_agent},
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

    async def post_protobuf(
        self, path: str, body: bytes, reply: type[ModelT], *, compress: bool = False
    ) -> ModelT:
        headers = {"Content-Encoding": "zstd"} if compress else {}
        content = await asyncio.to_thread(zstd_frame, body) if compress else body
        call = Call("POST", path, content, content_type=PROTOBUF, headers=headers)
        return _parse(await self.send(call), reply)

    async def get(self, path: str, reply: type[ModelT]) -> ModelT:
        return _parse(await self.send(Call("GET", path)), reply)

    async def send(self, call: Call) -> httpx.Response:
        """Retry connection errors, 408, 409, 429 and 5xx, and pause for 402; raise any other error
        status. All tries carry one idempotency key."""
        call = _with_key(call)
        start = time.monotonic()
        attempt = 0
        while True:
            outcome = await self._try(call)
            if isinstance(outcome, httpx.Response):
                return outcome
            error, asked_s = outcome
            backpressure = call.patient and isinstance(error, RateLimitError)
            limit_s, delay_s = self.retry.give_up_s, self.retry.delay_s(attempt)
            if isinstance(error, BillingError):
                limit_s, delay_s = self.max_billing_pause_s, self.retry.billing_pause_s
                logger.warning("paused: %s", error)
            if time.monotonic() - start >= limit_s and not backpressure:
                raise error
            await asyncio.sleep(max(delay_s, asked_s))
            attempt += 1

    async def send_once(self, call: Call) -> httpx.Response:
        """Without retries."""
        outcome = await self._try(_with_key(call))
        if isinstance(outcome, httpx.Response):
            return outcome
        raise outcome[0]

    async def _try(self, call: Call) -> httpx.Response | tuple[APIError, float]:
        """A success, or an error worth a retry and how long the server asks to wait; raises all
        other errors."""
        try:
            response = await self.request(call)
        except httpx.TimeoutException as error:
            return APITimeoutError(f"{call.path}: no answer in time ({error!r})"), 0.0
        except httpx.TransportError as error:
            return APIConnectionError(f"{call.path}: {error!r}"), 0.0
        if response.is_success:
            return response
        failure = status_error(response.status_code, body_of(response))
        if response.headers.get("x-should-retry") == "false":
            raise failure
        paused = response.status_code == 402 and call.path not in UNPAUSED
        if paused or is_transient(response):
            return failure, retry_after_s(response)
        raise failure

    async def request(self, call: Call) -> httpx.Response:
        """One exchange, whatever its status; a token that the server rejects is replaced once."""
        key = None if call.path == "auth/token" else await self.credentials.current()
        response = await self._exchange(call, key)
        if response.status_code != 401 or key is None or not _rejects_token(response):
            return response
        token = await self.credentials.replacing(key)
        return response if token is None else await self._exchange(call, token)

    async def _exchange(self, call: Call, key: str | None) -> httpx.Response:
        headers = {"Content-Type": call.content_type, "Accept": call.accept}
        headers |= {"X-API-Key": key} if key else {}
        headers |= call.headers
        if call.patient:
            headers["X-Tinker-Sampling-Backpressure"] = "1"
        try:
            response = await self._client.request(
                call.method,
                call.path,
                content=call.body or None,
                headers=headers,
                timeout=call.timeout_s,
            )
        except httpx.TimeoutException:  # a slow server is not an absent one
            raise
        except httpx.TransportError as error:
            self._outage.failed(error)
            raise
        self._outage.answered()
        return response


def is_transient(response: httpx.Response) -> bool:
    """A 400 without a body comes from a proxy on the way, not from the server."""
    status = response.status_code
    return status in (408, 409, 429) or status >= 500 or (status == 400 and not response.content)


def _rejects_token(response: httpx.Response) -> bool:
    return 'error="invalid_token"' in response.headers.get("www-authenticate", "")


def _with_key(call: Call) -> Call:
    if call.method == "GET" or IDEMPOTENCY_KEY in call.headers:
        return call
    headers = {**call.headers, IDEMPOTENCY_KEY: f"tinker-gmi-retry-{uuid.uuid4()}"}
    return replace(call, headers=headers)


def decoder(reply: type[ModelT]) -> Callable[[httpx.Response], ModelT]:
    """Decodes a JSON result."""
    return lambda response: _parse(response, reply)


def is_protobuf(response: httpx.Response) -> bool:
    return PROTOBUF in response.headers.get("content-type", "")


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
