"""Who calls: the API key, or a short-lived token that the server gives for it."""

import asyncio
import base64
import binascii
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

from tinker_gmi.connection.errors import (
    APIResponseValidationError,
    AuthenticationError,
    TinkerError,
)

logger = logging.getLogger("tinker_gmi")

Exchange = Callable[[str | None], Awaitable[str]]
"""From a credential to a JWT, by auth/token."""

RENEWAL_RETRY_S = 10.0


class Credentials:
    """The value of X-API-Key. Starts as the API key; `use_tokens` turns to the server's tokens,
    which are renewed at half of their lifetime, or where the server rejects one earlier."""

    def __init__(self, api_key: str | None):
        self._api_key = api_key
        self._command: str | None = None
        self._exchange: Exchange | None = None
        self._token = ""
        self._renew_at = 0.0  # monotonic
        self._lock = asyncio.Lock()

    def use_tokens(self, exchange: Exchange, command: str | None) -> None:
        """command: prints the credential to exchange, in place of the API key."""
        self._exchange, self._command = exchange, command

    async def current(self) -> str | None:
        """Raises what the exchange raised, where there is no token to go on with."""
        if self._exchange is None:
            return self._api_key
        if self._due():
            async with self._lock:  # concurrent calls need one exchange
                if self._due():
                    await self._renew(self._exchange)
        return self._token

    async def replacing(self, rejected: str | None) -> str | None:
        """A token other than the rejected one; None where there are no tokens."""
        if self._exchange is None:
            return None
        async with self._lock:
            if self._token == rejected:
                self._token = ""  # no token to go on with
                await self._renew(self._exchange)
        return self._token

    def _due(self) -> bool:
        return time.monotonic() >= self._renew_at or _seconds_left(self._token) <= 0

    async def _renew(self, exchange: Exchange) -> None:
        try:
            token = await exchange(await self.credential())
        except AuthenticationError:
            raise
        except TinkerError as error:
            if _seconds_left(self._token) <= 0:
                raise
            logger.warning("the token could not be renewed: %s", error)
            self._renew_at = time.monotonic() + RENEWAL_RETRY_S
            return
        lifetime_s = _lifetime_s(token)
        self._token = token
        self._renew_at = time.monotonic() + lifetime_s / 2

    async def credential(self) -> str | None:
        """What is exchanged for tokens. Raises TinkerError where its command prints none."""
        if self._command is None:
            return self._api_key
        process = await asyncio.create_subprocess_shell(
            self._command, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        credential = output.decode().strip()
        if not credential:
            raise TinkerError("TINKER_CREDENTIAL_CMD printed no credential")
        return credential


def jwt_claims(jwt: str) -> dict[str, Any]:
    """The signature is the server's own business. Raises APIResponseValidationError."""
    try:
        payload = jwt.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, ValueError, binascii.Error) as error:
        raise APIResponseValidationError("the server's token is no JWT") from error
    if not isinstance(claims, dict):
        raise APIResponseValidationError("the claims of the server's token are no object")
    return cast("dict[str, Any]", claims)


def _seconds_left(token: str) -> float:
    """0 without a token; endless where it does not say."""
    return float(jwt_claims(token).get("exp", math.inf)) - time.time() if token else 0.0


def _lifetime_s(token: str) -> float:
    claims = jwt_claims(token)
    issued = float(claims.get("iat", time.time()))
    return float(claims.get("exp", math.inf)) - issued
