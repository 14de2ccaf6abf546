"""Routes with JSON bodies: large ones are parsed in a thread, and the usual signature is served
without FastAPI's machinery, which takes longer than most of our handlers."""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from fastapi import Request, Response
from fastapi.params import Depends
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkercloud.errors import PayloadTooLarge, UserError
from tinkercloud.services.common.bodies import parse_json

BODY_KEY = "tinkercloud.body"  # where the middleware leaves the whole body in the ASGI scope
INLINE_BYTES = 64 * 1024  # larger bodies are parsed off the event loop
MAX_JSON_BYTES = 64 * 1024 * 1024  # of requests that carry no tensors

Endpoint = Callable[..., Awaitable[Response]]
Dependency = Callable[[Request], Awaitable[Any]]


class JsonRoute(APIRoute):
    """Parses large bodies in a thread, so that other requests are answered meanwhile. An endpoint
    whose arguments are a body and what `Depends` finds in the request alone is called directly;
    what is wrong with its body is found and told by FastAPI, as for all others."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any):
        super().__init__(path, endpoint, **options)
        direct = _direct(endpoint, self.app)
        if direct is not None:
            self.app = direct

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handler


class _JsonRequest(Request):
    async def json(self) -> Any:
        try:
            return await _value_of(await self.body())
        except UserError as error:
            if isinstance(error, PayloadTooLarge):
                raise
            # FastAPI answers 422 to this kind of error
            raise json.JSONDecodeError(str(error), "", 0) from None


async def _value_of(body: bytes) -> Any:
    """UserError where it is no JSON, or too large."""
    if len(body) > MAX_JSON_BYTES:
        raise PayloadTooLarge(f"a JSON body may have {MAX_JSON_BYTES} bytes here")
    if len(body) <= INLINE_BYTES:
        return parse_json(body)
    return await asyncio.to_thread(parse_json, body)


def _direct(endpoint: Endpoint, checked: ASGIApp) -> ASGIApp | None:
    """The endpoint as an application; None where its signature has more than that. checked: the
    same through FastAPI."""
    arguments: dict[str, Dependency] = {}
    hints = get_type_hints(endpoint, include_extras=True)
    hints.pop("return")
    for name, hint in hints.items():
        found = _dependency(hint)
        if found is None:
            return None
        arguments[name] = found

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            values = {name: await find(request) for name, find in arguments.items()}
        except _NotTaken:
            await checked(scope, receive, send)
            return
        response = await endpoint(**values)
        await response(scope, receive, send)

    return app


class _NotTaken(Exception):
    """There is something to refuse in the body."""


def _dependency(hint: Any) -> Dependency | None:
    """What finds an argument's value in the request alone; None: it needs more."""
    if hint is Request:
        return _itself
    if get_origin(hint) is Annotated:
        return _depended_on(get_args(hint)[1:])
    if get_origin(hint) is None and isinstance(hint, type) and issubclass(hint, BaseModel):
        return partial(_body, hint)
    return None


def _depended_on(marks: Sequence[object]) -> Dependency | None:
    finds = [mark.dependency for mark in marks if isinstance(mark, Depends)]
    if len(finds) != 1 or not inspect.iscoroutinefunction(finds[0]):
        return None
    return finds[0] if list(inspect.signature(finds[0]).parameters) == ["request"] else None


async def _itself(request: Request) -> Request:
    return request


async def _body(model: type[BaseModel], request: Request) -> BaseModel:
    if request.headers.get("content-type") != "application/json":  # FastAPI knows the others
        raise _NotTaken
    try:
        return model.model_validate(await _value_of(request.scope.get(BODY_KEY, b"")))
    except (UserError, ValidationError):
        raise _NotTaken from None
