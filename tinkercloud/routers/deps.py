"""Dependencies of the handlers, and the form of their answers."""

import asyncio
import ipaddress
import json
from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Query, Request, Response

from tinker_gmi.types import WireModel
from tinkercloud.errors import Forbidden
from tinkercloud.services.accounts.signed_links import PREFIX
from tinkercloud.services.container import Services
from tinkercloud.services.results.rest_service import MAX_LIMIT, tinker_path
from tinkercloud.storage.owners import Kind

# where authentication leaves them in the ASGI scope
USER_KEY, ROLE_KEY = "tinkercloud.user", "tinkercloud.role"
KEY_ID_KEY = "tinkercloud.key_id"
ANYTHING = "*/*"
SIGNED_PREFIX = PREFIX  # of the routes that ask for a signature in place of a key
HEALTHZ_PATH, READYZ_PATH = "/healthz", "/readyz"
DOCS_PATH = "/docs-site"
CONSOLE_PATH, CONSOLE_PREFIX = "/console", "/console/static/"  # the page and its files
OPEN_PATHS = frozenset({HEALTHZ_PATH, READYZ_PATH})  # of routes that anybody may call


def answer(body: WireModel, status_code: int = 200) -> Response:
    return json_answer(body.to_json_dict(), status_code)


def json_answer(body: object, status_code: int = 200) -> Response:
    # NaN and Infinity are no JSON: clients fail to decode them (wire specification, section 0).
    content = json.dumps(body, allow_nan=False)
    return Response(content, status_code, media_type="application/json")


async def large_json_answer(build: Callable[[], object]) -> Response:
    """The same, off the event loop: in small steps, as the encoder in C holds the GIL for its whole
    run."""
    return await asyncio.to_thread(
        lambda: Response(
            "".join(json.JSONEncoder(allow_nan=False).iterencode(build())),
            media_type="application/json",
        )
    )


async def services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


async def reader(request: Request) -> str:
    """The caller, whatever the key's role: for handlers that change nothing."""
    return request.scope[USER_KEY]


async def user(request: Request) -> str:
    """The caller. A key that is read-only gets no further, but by GET: what has another method and
    changes nothing asks for `reader`. Raises Forbidden."""
    name = request.scope[USER_KEY]
    if request.scope[ROLE_KEY] == "read-only" and request.method not in ("GET", "HEAD"):
        raise Forbidden(
            f"this key of {name!r} is read-only: it lists, reads and downloads, and neither "
            "trains, samples nor changes anything; the operator makes another with "
            f"`tinkercloud keys add {name}`"
        )
    return name


async def audience(request: Request) -> str | None:
    """Whose usage and audit log the caller sees: an administrator everybody's, which is None."""
    return None if request.scope[ROLE_KEY] == "admin" else request.scope[USER_KEY]


async def observed(request: Request) -> str | None:
    """Whose numbers the caller sees; None: the whole server's."""
    user: str = request.scope[USER_KEY]
    observers = (await services(request)).observers
    return None if observers.include(user, request.scope[ROLE_KEY]) else user


async def owner(request: Request) -> str:
    """The caller; for an administrator the owner of what the path names, as whom the request is
    then served. Raises Forbidden."""
    name = await user(request)
    return name if request.scope[ROLE_KEY] != "admin" else await _owner_of_path(request, name)


async def _owner_of_path(request: Request, name: str) -> str:
    for kind, part in _PATH_PARTS:
        if part in request.path_params:
            return await acting_owner(request, kind, request.path_params[part])
    raise AssertionError(f"{request.url.path} names nothing that has an owner")


_PATH_PARTS: tuple[tuple[Kind, str], ...] = (
    ("model", "run_id"),
    ("session", "session_id"),
    ("sampler", "sampler_id"),
    ("request", "request_id"),
    ("capture", "capture_id"),
)


async def acting_owner(request: Request, kind: Kind, name: str) -> str:
    """The owner of something for an administrator, with an entry in the owner's audit log where it
    may be changed; else, and where there is no such thing, the caller."""
    caller = await user(request)
    if request.scope[ROLE_KEY] != "admin":
        return caller
    app_services = await services(request)
    owner = await app_services.owners.of(kind, name)
    if owner is None or owner == caller:
        return caller
    if request.method != "GET":
        call = f"{request.method} {request.url.path}"
        about = {"actor": caller, "call": call, kind: name}
        await app_services.audit.record(owner, "organizations", "admin_request", **about)
    return owner


async def accepted_types(request: Request) -> str:
    return request.headers.get("accept", ANYTHING)


async def checkpoint_path(run_id: str, segment: str, name: str) -> str:
    return tinker_path(run_id, f"{segment}/{name}")


async def on_this_machine(request: Request) -> bool:
    """Whether the client can read this machine's files: not through a proxy, not from elsewhere."""
    if request.client is None or "x-forwarded-for" in request.headers:
        return False
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False


ServicesDep = Annotated[Services, Depends(services)]
UserDep = Annotated[str, Depends(user)]
ReaderDep = Annotated[str, Depends(reader)]
OwnerDep = Annotated[str, Depends(owner)]
AudienceDep = Annotated[str | None, Depends(audience)]
AcceptDep = Annotated[str, Depends(accepted_types)]
ObservedDep = Annotated[str | None, Depends(observed)]
CheckpointPathDep = Annotated[str, Depends(checkpoint_path)]
LocalDep = Annotated[bool, Depends(on_this_machine)]
LimitDep = Annotated[int, Query(ge=0, le=MAX_LIMIT)]
OffsetDep = Annotated[int, Query(ge=0, le=2**62)]
