"""Short-lived access tokens: JSON Web Tokens (RFC 7519) signed with HMAC-SHA256 (RFC 7515).

A token stands for an API key and names it; it ends with its hour, or with the key.
"""

import base64
import binascii
import hashlib
import hmac
import json
import time
from collections.abc import Mapping
from typing import Any

TOKEN_PREFIX = "eyJ"  # how a token is told from a key: base64url of '{"'
LIFETIME_S = 3600  # clients refresh at half of it, those up to 0.25 five minutes before its end
MAX_TOKEN_CHARS = 4096


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


_HEADER = _encoded(b'{"alg":"HS256","typ":"JWT"}')


class TokenSigner:
    def __init__(self, secret: bytes):
        self._secret = secret

    def sign(self, claims: Mapping[str, object]) -> str:
        """A token with these claims that is valid for LIFETIME_S from now."""
        now = int(time.time())
        full = {**claims, "iat": now, "exp": now + LIFETIME_S}
        body = f"{_HEADER}.{_encoded(json.dumps(full, separators=(',', ':')).encode())}"
        return f"{body}.{self._signature(body)}"

    def claims(self, token: str) -> dict[str, Any] | None:
        """The claims of a token that was signed here and has not expired; else None."""
        body, _, signature = token.rpartition(".")
        if len(token) > MAX_TOKEN_CHARS or not token.isascii():
            return None
        # The signature before anything is read. The header is compared, not obeyed: a token cannot
        # choose its algorithm (RFC 8725, section 3.1).
        if not hmac.compare_digest(signature, self._signature(body)):
            return None
        header, _, payload = body.partition(".")
        if header != _HEADER:
            return None
        try:
            claims = json.loads(_decoded(payload))
        except (ValueError, binascii.Error):
            return None
        return claims if time.time() < claims["exp"] else None

    def _signature(self, body: str) -> str:
        return _encoded(hmac.new(self._secret, body.encode(), hashlib.sha256).digest())
