"""One server behind the proxy: its address, and requests to it."""

import asyncio
import ipaddress
import json
import socket
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urldefrag, urlsplit

import httpx

from tinkercloud.errors import (
    ConfigError,
    UpstreamAnswerInvalid,
    UpstreamRefused,
    UpstreamUnreachable,
)
from tinkercloud.proxy.answers import Json, json_object

MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_EVENT_BYTES = 1024 * 1024
SGLANG_PATH = "/generate"


@dataclass(frozen=True, slots=True)
class UpstreamAddress:
    """base_url: as clients of OpenAI's API take it, without a slash at its end. model None: the
    first that the server lists."""

    base_url: str
    model: str | None = None

    @classmethod
    def parse(cls, text: str) -> "UpstreamAddress":
        """Of "URL" or "URL#MODEL". Raises ConfigError."""
        url, model = urldefrag(text)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(
                f"{text!r} is no address of an upstream; write http://HOST:PORT/v1, the base URL "
                "that clients of OpenAI's API take, with #MODEL at its end where it serves several"
            )
        if parts.username is not None:
            raise ConfigError("an upstream's key goes into a file, not into its address")
        return cls(url.rstrip("/"), model or None)

    @property
    def root(self) -> str:
        return self.base_url.removesuffix("/v1")


class PublicOnly(httpx.AsyncBaseTransport):
    """Refuses private, loopback and link-local addresses. A name is looked up once for a request,
    and the request goes to the address that was looked at: another answer of the name server in
    between changes nothing."""

    def __init__(self, inner: httpx.AsyncBaseTransport):
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        address = await public_address(host, request.url.port or 443)
        request.url = request.url.copy_with(host=address)
        request.extensions = {**request.extensions, "sni_hostname": host}
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()


async def public_address(host: str, port: int) -> str:
    """Raises UpstreamUnreachable."""
    try:
        loop = asyncio.get_running_loop()
        answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UpstreamUnreachable(f"{host} has no address: {error.strerror}") from None
    addresses = [str(address[4][0]) for address in answers]
    if not addresses or not all(ipaddress.ip_address(address).is_global for address in addresses):
        raise UpstreamUnreachable(
            f"{host} has a private address; start the proxy with --allow-private to allow it"
        )
    return addresses[0]


class Upstream:
    """model: the name that it knows its model by. trouble: why its last answer is none; "": it is
    one, if only a refusal. answered_at: when the last one came, of the monotonic clock."""

    def __init__(self, address: UpstreamAddress, http: httpx.AsyncClient, model: str = ""):
        self.address = address
        self.model = address.model or model
        self.trouble = ""
        self.answered_at: float | None = None
        self._http = http

    @property
    def name(self) -> str:
        return self.address.base_url

    def url(self, path: str) -> str:
        base = self.address.root if path.startswith("/") else f"{self.address.base_url}/"
        return base + path

    async def get(self, path: str) -> Json:
        return json_object(await self._exchange("GET", path, None), "the answer")

    async def get_list(self, path: str) -> list[Any]:
        """Raises as `post`."""
        answer = await self._exchange("GET", path, None)
        if not isinstance(answer, list):
            raise UpstreamAnswerInvalid(f"the answer of {self.name} is no list")
        return answer

    async def post(self, path: str, body: Mapping[str, Any]) -> Json:
        """Requests get the model's name, but SGLang's, which serves one. Cancelling the call closes
        the connection, by which the server ends its work.

        Raises UpstreamUnreachable, UpstreamRefused, UpstreamAnswerInvalid."""
        answer = await self._exchange("POST", path, self._named(path, body))
        return json_object(answer, "the answer")

    def _named(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return body if path == SGLANG_PATH else {**body, "model": self.model}

    async def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None) -> object:
        async with self._opened(method, path, body) as response:
            content = await self._content(response)
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise UpstreamAnswerInvalid(f"the answer of {self.name} is no JSON") from None

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes]:
        """Of an answer that is streamed: each whole, with the empty line at its end. Closing it
        closes the connection. Raises as `post`."""
        left = b""
        async with self._opened("POST", path, self._named(path, body)) as response:
            async for piece in self._pieces(response):
                *whole, left = (left + piece).replace(b"\r\n", b"\n").split(b"\n\n")
                for event in whole:
                    yield event + b"\n\n"
                if len(left) > MAX_EVENT_BYTES:
                    raise UpstreamAnswerInvalid(f"{self.name} streams no events")
        if left.strip():
            yield left + b"\n\n"

    async def _content(self, response: httpx.Response) -> bytes:
        content = bytearray()
        async for piece in self._pieces(response):
            content += piece
            if len(content) > MAX_ANSWER_BYTES:
                raise UpstreamAnswerInvalid(
                    f"the answer of {self.name} has more than {MAX_ANSWER_BYTES} bytes"
                )
        return bytes(content)

    async def _pieces(self, response: httpx.Response) -> AsyncGenerator[bytes]:
        try:
            async for piece in response.aiter_bytes():
                yield piece
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    @asynccontextmanager
    async def _opened(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncGenerator[httpx.Response]:
        request = self._http.build_request(method, self.url(path), json=body)
        try:
            response = await self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        try:
            if response.status_code != httpx.codes.OK:
                content = await self._content(response)
                refused = UpstreamRefused(self.name, response.status_code, content)
                self._answered(str(refused) if response.is_server_error else "")
                raise refused
            self._answered()
            yield response
        finally:
            await response.aclose()

    def _answered(self, trouble: str = "") -> None:
        self.answered_at, self.trouble = time.monotonic(), trouble

    def _unreachable(self, error: Exception) -> UpstreamUnreachable:
        self.trouble = str(error) or type(error).__name__
        return UpstreamUnreachable(f"{self.name}: {self.trouble}")
