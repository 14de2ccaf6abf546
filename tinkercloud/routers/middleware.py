"""Before any route is looked up: authentication, then the request's body, within its limits."""

import asyncio
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Protocol

import zstandard
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinkercloud.errors import PayloadTooLarge, UserError
from tinkercloud.routers.console import CHALLENGE, PATHS, basic_password
from tinkercloud.routers.deps import SIGNED_PREFIX, USER_KEY
from tinkercloud.routers.error_forms import error_answer
from tinkercloud.routers.json_route import BODY_KEY
from tinkercloud.storage.tokens import TOKEN_PREFIX

_PIECE_BYTES = 1024  # 1 kB of zstd inflates to some tens of MB at most


class KeyLookup(Protocol):
    def user_of(self, key: str) -> str | None: ...


class Authenticator:
    """The user of a request. everybody: the user of all requests, where no keys are needed."""

    def __init__(self, *, everybody: str | None):
        self._everybody = everybody
        self.keys: KeyLookup | None = None  # opened when the server starts

    def user_of(self, headers: Headers) -> str | None:
        if self._everybody is not None:
            return self._everybody
        return self.user_of_key(credential_of(headers))

    def user_of_key(self, credential: str) -> str | None:
        return self.keys.user_of(credential) if self.keys is not None and credential else None


def credential_of(headers: Headers) -> str:
    """The key or token of a request; "" where it has none."""
    key = headers.get("x-api-key")
    if key is not None:
        return key
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _unknown_text(credential: str) -> str:
    if not credential:
        return "this server needs an API key: send it as X-API-Key or Bearer token (tml-...)"
    if credential.startswith(TOKEN_PREFIX):
        return "the token is not of this server or has expired; ask for another with an API key"
    return "the API key is not one of this server's: `tinkercloud keys add` makes one there"


class AuthMiddleware:
    """Answers 401 before a route is looked up or a byte of the body is read. Signed links pass:
    their route checks them."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator):
        self._app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise AssertionError(f"no {scope['type']} here")
        if scope["method"] == "GET" and scope["path"].startswith(SIGNED_PREFIX):
            # No user, so that no other handler could answer: each of them asks for one.
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        user = self._authenticator.user_of(headers)
        console = scope["method"] == "GET" and PATHS.fullmatch(scope["path"]) is not None
        if user is None and console:
            # For pages that change nothing only: browsers send it with links of other sites too.
            password = basic_password(headers.get("authorization", ""))
            user = self._authenticator.user_of_key(password)
        if user is None:
            text = _unknown_text(credential_of(headers))
            # a client with a token of an hour gets another one and repeats the request (RFC 6750)
            token = credential_of(headers).startswith(TOKEN_PREFIX)
            challenge = {"www-authenticate": 'Bearer error="invalid_token"'} if token else {}
            challenge = CHALLENGE if console and not token else challenge
            await refuse(send, scope["path"], 401, text, challenge)
            return
        scope[USER_KEY] = user
        await self._app(scope, receive, send)


class BodyMiddleware:
    """Reads the body within limits and hands it on decompressed."""

    def __init__(self, app: ASGIApp, max_body_bytes: int):
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._body(Headers(scope=scope), receive)
        except UserError as error:
            await refuse(send, scope["path"], error.status, str(error))
            return
        if body is None:  # the client went away
            return
        headers = MutableHeaders(scope=scope)
        del headers["content-encoding"]
        headers["content-length"] = str(len(body))
        scope[BODY_KEY] = body
        await self._app(scope, _replay(body, receive), send)

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._max_body_bytes:
            raise self._too_large()
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._max_body_bytes:
                raise self._too_large()
        return await self._decoded(bytes(body), headers.get("content-encoding", "identity"))

    async def _decoded(self, body: bytes, encoding: str) -> bytes:
        encoding = encoding.strip().lower()
        if encoding in ("", "identity") or not body:
            return body
        inflate = _DECODERS.get(encoding)
        if inflate is None:
            raise UserError(f"content encoding {encoding!r} is not taken; send zstd or gzip")
        plain = await asyncio.to_thread(_inflated, inflate(), body, self._max_body_bytes)
        if plain is None:
            raise self._too_large()
        return plain

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body exceeds {self._max_body_bytes} bytes")


class _Inflater(Protocol):
    """feed: the plain bytes of a piece. done: whether the stream came to its end."""

    def feed(self, piece: bytes) -> bytes: ...

    @property
    def done(self) -> bool: ...


class _Gzip:
    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=31)

    def feed(self, piece: bytes) -> bytes:
        return self._stream.decompress(piece)

    @property
    def done(self) -> bool:
        return self._stream.eof


class _Zstd:
    def __init__(self) -> None:
        self._stream = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()

    def feed(self, piece: bytes) -> bytes:
        return self._stream.decompress(piece)

    @property
    def done(self) -> bool:
        return self._stream.eof


_DECODERS: dict[str, Callable[[], _Inflater]] = {"gzip": _Gzip, "zstd": _Zstd}


def _inflated(inflater: _Inflater, body: bytes, limit: int) -> bytes | None:
    """None: more than limit bytes. Pieces are small, so a bomb never comes to its full size."""
    plain = bytearray()
    try:
        for start in range(0, len(body), _PIECE_BYTES):
            if inflater.done:
                break
            plain += inflater.feed(body[start : start + _PIECE_BYTES])
            if len(plain) > limit:
                return None
    except (zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"the compressed body cannot be read: {error}") from None
    if not inflater.done:
        raise UserError("the compressed body ends too early")
    return bytes(plain)


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


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
