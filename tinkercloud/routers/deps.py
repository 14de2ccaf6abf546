"""Dependencies of the handlers, and the form of their answers."""

import asyncio
import ipaddress
import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Query, Request, Response
from fastapi.routing import APIRoute

from tinker_gmi.types import WireModel
from tinkercloud.errors import PayloadTooLarge, UserError
from tinkercloud.services.accounts.signed_links import PREFIX
from tinkercloud.services.common.bodies import parse_json
from tinkercloud.services.container import Services
from tinkercloud.services.models.rest_service import MAX_LIMIT, tinker_path

USER_KEY = "tinkercloud.user"  # where authentication leaves the user in the ASGI scope
SIGNED_PREFIX = PREFIX  # of the one route that needs no key
INLINE_BYTES = 64 * 1024  # larger bodies are parsed off the event loop
MAX_JSON_BYTES = 64 * 1024 * 1024  # of requests that carry no tensors


def answer(body: WireModel, status_code: int = 200) -> Response:
    return json_answer(body.to_json_dict(), status_code)


def json_answer(body: object, status_code: int = 200) -> Response:
    # NaN and Infinity are no JSON: clients fail to decode them (wire specification, section 0).
    content = json.dumps(body, allow_nan=False)
    return Response(content, status_code, media_type="application/json")


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if len(body) > MAX_JSON_BYTES:
            raise PayloadTooLarge(f"a JSON body may have {MAX_JSON_BYTES} bytes here")
        if len(body) <= INLINE_BYTES:
            return _parsed(body)
        return await asyncio.to_thread(_parsed, body)


def _parsed(body: bytes) -> Any:
    try:
        return parse_json(body)
    except UserError as error:
        # FastAPI answers 422 to this kind of error
        raise json.JSONDecodeError(str(error), "", 0) from None


class JsonRoute(APIRoute):
    """Parses large bodies in a thread, so that other requests are answered meanwhile."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handler


async def services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


async def user(request: Request) -> str:
    return request.scope[USER_KEY]


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
CheckpointPathDep = Annotated[str, Depends(checkpoint_path)]
LocalDep = Annotated[bool, Depends(on_this_machine)]
LimitDep = Annotated[int, Query(ge=0, le=MAX_LIMIT)]
OffsetDep = Annotated[int, Query(ge=0, le=2**62)]
