"""Dependencies of the handlers, and the form of their answers."""

import ipaddress
import json
from typing import Annotated

from fastapi import Depends, Query, Request, Response

from tinker_gmi.types import WireModel
from tinkercloud.services.accounts.signed_links import PREFIX
from tinkercloud.services.container import Services
from tinkercloud.services.models.rest_service import MAX_LIMIT, tinker_path

USER_KEY = "tinkercloud.user"  # where authentication leaves the user in the ASGI scope
ANYTHING = "*/*"
SIGNED_PREFIX = PREFIX  # of the one route that needs no key


def answer(body: WireModel, status_code: int = 200) -> Response:
    return json_answer(body.to_json_dict(), status_code)


def json_answer(body: object, status_code: int = 200) -> Response:
    # NaN and Infinity are no JSON: clients fail to decode them (wire specification, section 0).
    content = json.dumps(body, allow_nan=False)
    return Response(content, status_code, media_type="application/json")


async def services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


async def user(request: Request) -> str:
    return request.scope[USER_KEY]


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
AcceptDep = Annotated[str, Depends(accepted_types)]
CheckpointPathDep = Annotated[str, Depends(checkpoint_path)]
LocalDep = Annotated[bool, Depends(on_this_machine)]
LimitDep = Annotated[int, Query(ge=0, le=MAX_LIMIT)]
OffsetDep = Annotated[int, Query(ge=0, le=2**62)]
