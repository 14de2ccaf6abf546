"""Links to one file each that need no key: signed, and good for a limited time.

A link names its file, its reader and its end; the signature is an HMAC-SHA256 over all of these
with a secret of this server (RFC 2104), so a link that was changed anywhere is no link.
"""

import hashlib
import hmac
import json
import time
from dataclasses import astuple, dataclass, replace
from urllib.parse import quote, urlencode

from tinkercloud.errors import LinkRefused

PREFIX = "/api/v1/signed/"
LIFETIME_S = 3600  # clients ask again once less than five minutes are left


@dataclass(frozen=True, slots=True)
class SignedLink:
    """generation: which saving of that name. reader: the user whom the link was made for. expires:
    in seconds since the epoch, as text since it comes as text."""

    run_id: str
    segment: str
    name: str
    generation: str
    file: str
    reader: str
    expires: str = ""
    signature: str = ""

    @property
    def url_path(self) -> str:
        parts = (self.run_id, self.segment, self.name, self.generation, self.file)
        query = {"reader": self.reader, "expires": self.expires, "signature": self.signature}
        return PREFIX + "/".join(quote(part, safe=":") for part in parts) + "?" + urlencode(query)


def sign(link: SignedLink, secret: bytes, expires: int) -> SignedLink:
    """The link with its end and its signature."""
    link = replace(link, expires=str(expires))
    return replace(link, signature=_signature(link, secret))


def check(link: SignedLink, secret: bytes) -> None:
    """Raises LinkRefused unless the link is whole and has not ended."""
    expected = _signature(link, secret)
    if not hmac.compare_digest(expected.encode(), link.signature.encode("utf-8", "replace")):
        raise LinkRefused()
    if int(link.expires) <= time.time():  # a number, since we signed it
        raise LinkRefused()


def _signature(link: SignedLink, secret: bytes) -> str:
    # As JSON, so that no two links have the same text.
    text = json.dumps(astuple(replace(link, signature="")))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
