"""Routes with JSON bodies: large ones are parsed in another process, and the usual signature is
served without FastAPI's machinery, which takes longer than most of our handlers."""

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.params import Depends
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkercloud.errors import PayloadTooLarge, UserError
from tinkercloud.routers.deps import services
from tinkercloud.routers.http.body_budget import lease_of
from tinkercloud.services.common.bodies import Faults, parse_json, validated

BODY_KEY = "tinkercloud.body"  # where the middleware leaves the whole body in the ASGI scope
INLINE_BYTES = 64 * 1024  # larger bodies are parsed off the event loop
MAX_JSON_BYTES = 8 * 1024 * 1024  # of requests that carry no training data
MAX_TRAINING_JSON_BYTES = 32 * 1024 * 1024
"""Clients up to 0.24, which train by JSON, send at most 5 MB at once."""
PARSED_FACTOR = 10  # lists of Python numbers take so many times the memory of their text

Endpoint = Callable[..., Awaitable[Response]]
Dependency = Callable[[Request], Awaitable[Any]]
T = TypeVar("T")


class InvalidBody(RequestValidationError):
    def __init__(self, faults: Faults):
        super().__init__([{**fault, "loc": ("body", *fault["loc"])} for fault in faults.first])
        self.num_errors = faults.num_errors


async def parsed(request: Request, parse: Callable[[bytes], T], body: bytes, max_bytes: int) -> T:
    """What parse makes of the body: at once, or in another process if it is large. Raises what
    parse does, PayloadTooLarge, TooManyRequests."""
    if len(body) > max_bytes:
        raise PayloadTooLarge(
            f"the JSON body has {len(body)} bytes; at most {max_bytes} are taken here"
        )
    if len(body) <= INLINE_BYTES:
        return parse(body)
    await lease_of(request).grow(PARSED_FACTOR * len(body))
    return await (await services(request)).bodies.run(parse, body)


class JsonRoute(APIRoute):
    """An endpoint whose arguments are a body and what `Depends` finds in the request alone is
    called directly; others by FastAPI, which gets small bodies only."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any):
        super().__init__(path, endpoint, **options)
        direct = _direct(endpoint, self.app)
        if direct is not None:
            self.app = direct

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        model = None if self.body_field is None else self.body_field.field_info.annotation

        async def handler(request: Request) -> Response:
            # Here, as FastAPI makes a 400 of whatever else is raised while it reads the body.
            value = await _json_value(model, request) if _has_json(request) else None
            return await handle(_JsonRequest(value, request))

        return handler


class _JsonRequest(Request):
    """FastAPI takes a body as it is where it is of its type already."""

    def __init__(self, value: object, request: Request):
        super().__init__(request.scope, request.receive)
        self._value = value

    async def json(self) -> Any:
        return self._value


def _has_json(request: Request) -> bool:
    """By its content type; an empty body is none."""
    content_type = request.headers.get("content-type", "").partition(";")[0]
    has_body = bool(request.scope.get(BODY_KEY))
    return has_body and content_type.strip().lower() == "application/json"


async def _json_value(model: Any, request: Request) -> Any:
    """The body, as one of the model where it is one. Raises InvalidBody."""
    body = request.scope[BODY_KEY]
    is_model = isinstance(model, type) and issubclass(model, BaseModel)
    parse = partial(validated, model) if is_model else parse_json
    try:
        value = await parsed(request, parse, body, MAX_JSON_BYTES if is_model else INLINE_BYTES)
    except UserError as error:
        if type(error) is not UserError:  # too large, or no room
            raise
        fault = {"type": "json_invalid", "loc": (0,), "msg": "", "ctx": {"error": str(error)}}
        raise InvalidBody(Faults([fault], 1)) from None
    if isinstance(value, Faults):
        raise InvalidBody(value)
    return value


def _direct(endpoint: Endpoint, checked: ASGIApp) -> ASGIApp | None:
    """The endpoint as an application; None where its signature has more than that. checked: the
    same through FastAPI."""
    arguments: dict[str, Dependency] = {}
    hints = get_type_hints(endpoint, include_extras=True)
    hints.pop("return")
    for name, hint in hints.items():
        dependency = _dependency(hint)
        if dependency is None:
            return None
        arguments[name] = dependency

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
    """There is no body, or it is no JSON by its content type."""


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
    if not _has_json(request):  # FastAPI says what is wrong with others
        raise _NotTaken
    return await _json_value(model, request)
