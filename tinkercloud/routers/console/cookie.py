"""The console's cookie: a token of an API key that a browser keeps and no script can read.

It opens what is read by GET, the chat box and signing out, and only from the console's own pages:
what other sites, or other ports of this host, make a browser send has it not or says where it is
from.
"""

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.types import Scope

from tinkercloud.routers.deps import CONSOLE_PATH
from tinkercloud.storage.tokens import LIFETIME_S

COOKIE = "tinkercloud_console"
SESSION_PATH = f"{CONSOLE_PATH}/session"
CHAT_PATH = f"{CONSOLE_PATH}/chat"
_CALLS = {("POST", CHAT_PATH), ("DELETE", SESSION_PATH)}
_OWN_SITES = {"", "same-origin", "none"}  # "": a browser without Fetch Metadata; "none": typed in


def cookie_token(scope: Scope, headers: Headers) -> str:
    """The token of a request that the cookie is valid for; "" where it has none."""
    is_read = scope["method"] in ("GET", "HEAD")
    if not is_read and (scope["method"], scope["path"]) not in _CALLS:
        return ""
    if headers.get("sec-fetch-site", "") not in _OWN_SITES:
        return ""
    return cookie_parser(headers.get("cookie", "")).get(COOKIE, "")


def keep_cookie(response: Response, token: str, *, secure: bool) -> None:
    """secure: whether the browser speaks TLS; a cookie without it would not come by plain HTTP."""
    response.set_cookie(
        COOKIE, token, max_age=LIFETIME_S, httponly=True, samesite="strict", secure=secure
    )


def drop_cookie(response: Response) -> None:
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
