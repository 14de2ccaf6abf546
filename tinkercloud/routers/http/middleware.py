"""Authentication, before any route is looked up."""

from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkercloud.logs import about
from tinkercloud.routers.console.cookie import cookie_token
from tinkercloud.routers.console.links import PATHS
from tinkercloud.routers.deps import (
    CONSOLE_PATH,
    CONSOLE_PREFIX,
    DOCS_PATH,
    KEY_ID_KEY,
    OPEN_PATHS,
    ROLE_KEY,
    SIGNED_PREFIX,
    USER_KEY,
)
from tinkercloud.routers.http.refusal import refuse
from tinkercloud.services.accounts.account_service import CONSOLE_USE
from tinkercloud.services.accounts.quotas import with_key
from tinkercloud.storage.keys import KeyRecord
from tinkercloud.storage.tokens import TOKEN_PREFIX


class KeyLookup(Protocol):
    def identify(self, credential: str, use: str = "") -> KeyRecord | None: ...


class Authenticator:
    """The key of a request. everybody: the user of all requests, where no keys are needed."""

    def __init__(self, *, everybody: str | None):
        self._everybody = None if everybody is None else KeyRecord("", everybody, b"")
        self.keys: KeyLookup | None = None  # opened when the server starts

    def key_of(self, headers: Headers) -> KeyRecord | None:
        if self._everybody is not None:
            return self._everybody
        return self.identify(credential_of(headers))

    def identify(self, credential: str, use: str = "") -> KeyRecord | None:
        return self.keys.identify(credential, use) if self.keys is not None and credential else None


def credential_of(headers: Headers) -> str:
    """The key or token of a request; "" where it has none."""
    key = headers.get("x-api-key")
    if key is not None:
        return key
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _is_open(scope: Scope) -> bool:
    """Whether anybody may call it: its route checks a signature, or tells nothing of users."""
    path: str = scope["path"]
    return scope["method"] == "GET" and (
        path.startswith((SIGNED_PREFIX, CONSOLE_PREFIX))
        or f"{path}/".startswith(f"{DOCS_PATH}/")
        or path == CONSOLE_PATH
        or path in OPEN_PATHS
        or PATHS.fullmatch(path) is not None
    )


def _unknown_text(credential: str) -> str:
    if not credential:
        return "this server needs an API key: send it as X-API-Key or Bearer token (tml-...)"
    if credential.startswith(TOKEN_PREFIX):
        return "the token is not of this server or has expired; ask for another with an API key"
    return "the API key is not one of this server's: `tinkercloud keys add` makes one there"


class AuthMiddleware:
    """Answers 401 before a route is looked up or a byte of the body is read. Signed links pass:
    their route checks them; so do what supervisors ask (`OPEN_PATHS`), the documentation, the files
    of the console and links to it, which hold nothing of anybody."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator):
        self._app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise AssertionError(f"no {scope['type']} here")
        if _is_open(scope):
            # No user, so that no other handler could answer: each of them asks for one.
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        key = self._authenticator.key_of(headers)
        if key is None and not credential_of(headers):
            key = self._authenticator.identify(cookie_token(scope, headers), CONSOLE_USE)
        if key is None:
            text = _unknown_text(credential_of(headers))
            # a client with a token of an hour gets another one and repeats the request (RFC 6750)
            token = credential_of(headers).startswith(TOKEN_PREFIX)
            challenge = {"www-authenticate": 'Bearer error="invalid_token"'} if token else {}
            await refuse(send, scope["path"], 401, text, challenge)
            return
        scope[USER_KEY], scope[ROLE_KEY], scope[KEY_ID_KEY] = key.user, key.role, key.key_id
        about(user=key.user, call=f"{scope['method']} {scope['path']}")
        with with_key(key):
            await self._app(scope, receive, send)
