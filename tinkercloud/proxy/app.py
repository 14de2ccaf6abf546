"""OpenAI's API in front of the upstreams."""

import hmac
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkercloud.errors import (
    InvalidField,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    TinkercloudError,
    TooManyRequests,
    UpstreamRefused,
)
from tinkercloud.event_stream import CLIENT_GONE, EventStream, server_sent, until_gone
from tinkercloud.openai_api.bodies import ChatBody, CompletionBody
from tinkercloud.openai_api.errors import error_body
from tinkercloud.page_files import PageFiles
from tinkercloud.proxy.answering import AnswerWriter, SpeculatedAnswer
from tinkercloud.proxy.metrics import CONTENT_TYPE, exposition, status_json
from tinkercloud.proxy.passed_tokens import StreamedTokens, num_tokens
from tinkercloud.proxy.service import ProxyService

logger = logging.getLogger(__name__)

router = APIRouter()

DONE = b"data: [DONE]\n\n"
DASHBOARD, DASHBOARD_FILES = "/dashboard", "/dashboard/static/"
OPEN_PATHS = ("/health", DASHBOARD)
CHAT, TEXT = "chat/completions", "completions"
FORMS: Mapping[str, type[ChatBody] | type[CompletionBody]] = {CHAT: ChatBody, TEXT: CompletionBody}
FAULTS_OF_REQUESTS = (400, 413, 422, 429)
SHARED = ("charts.js", "dom.js", "icon.svg", "style.css", "uplot")
FILES = PageFiles(
    {"": "proxy/dashboard", **{f"console/{name}": f"console/{name}" for name in SHARED}}
)


class KeyMiddleware:
    """Answers 401 before a route is looked up or a byte of the body is read. key None: none is
    asked for. The dashboard's files are for everybody: what they show they have to ask for."""

    def __init__(self, app: ASGIApp, key: str | None):
        self._app = app
        self._expected = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._expected and not _is_open(scope["path"]):
            sent = Headers(scope=scope).get("authorization", "")
            if not hmac.compare_digest(sent.encode(), self._expected):
                text = "this proxy wants its key, as Authorization: Bearer KEY"
                await JSONResponse(error_body(401, text), 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(DASHBOARD_FILES)


Opened = Callable[[], AbstractAsyncContextManager[ProxyService]]


def create_proxy_app(opened: Opened, key: str | None = None) -> FastAPI:
    """The ASGI application. opened: the service, for as long as the application runs. key: that
    every request has to send, but those for /health and for the dashboard's files."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        async with opened() as service:
            app.state.service = service
            yield

    app = FastAPI(title="tinkercloud proxy", openapi_url=None, lifespan=lifespan)
    app.add_middleware(KeyMiddleware, key=key)
    app.add_exception_handler(TinkercloudError, _named_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.include_router(router)
    return app


def _service(request: Request) -> ProxyService:
    return request.app.state.service


ServiceDep = Annotated[ProxyService, Depends(_service)]


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, service: ServiceDep) -> Response:
    return await answer(service, request, CHAT)


@router.post("/v1/completions")
async def completions(request: Request, service: ServiceDep) -> Response:
    return await answer(service, request, TEXT)


@router.get("/v1/models")
async def models(service: ServiceDep) -> Response:
    return JSONResponse({"object": "list", "data": [service.target.entry]})


@router.get("/v1/models/{name:path}")
async def model(name: str, service: ServiceDep) -> Response:
    if name != service.target.model:
        raise NotFound(f"this proxy serves {service.target.model}")
    return JSONResponse(service.target.entry)


@router.get("/health")
async def health() -> Response:
    return JSONResponse({"status": "ok"})


@router.get("/status")
async def status(service: ServiceDep) -> Response:
    return JSONResponse(status_json(service))


@router.get("/metrics")
async def metrics(service: ServiceDep) -> Response:
    return Response(exposition(service), media_type=CONTENT_TYPE)


@router.get(DASHBOARD)
async def dashboard() -> Response:
    return FILES.page()


@router.get(DASHBOARD_FILES + "{path:path}")
async def dashboard_file(path: str) -> Response:
    return FILES.answer(path)


@dataclass(frozen=True, slots=True)
class Call:
    """path: below an OpenAI base URL. fields: the body as the client sent it."""

    path: str
    body: ChatBody | CompletionBody
    fields: Mapping[str, Any]


async def answer(service: ProxyService, request: Request, path: str) -> Response:
    try:
        fields = await _fields(request, service.limits.max_body_bytes)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    try:
        body = FORMS[path].model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise InvalidField(name, f"{name}: {first['msg']}") from None
    service.check(body)
    call = Call(path, body, fields)
    speculated = await service.begin(body)
    if body.stream:
        return EventStream(_stream(service, call, speculated), _failed)
    response = await until_gone(request.receive, _whole(service, call, speculated))
    return Response(status_code=CLIENT_GONE) if response is None else response


async def _fields(request: Request, max_bytes: int) -> dict[str, Any]:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise PayloadTooLarge(f"the body exceeds {max_bytes} bytes")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequest("the body is not JSON") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body is not a JSON object")
    return fields


async def _whole(
    service: ProxyService, call: Call, speculated: SpeculatedAnswer | None
) -> Response:
    with service.running():
        if speculated is None:
            passed = await service.upstream.post(call.path, call.fields)
            service.counts.passed_tokens += num_tokens(passed)
            return JSONResponse(passed)
        async with aclosing(speculated.events()) as events:
            async for _ in events:
                pass
        return JSONResponse(AnswerWriter(call.body, speculated).whole())


async def _stream(
    service: ProxyService, call: Call, speculated: SpeculatedAnswer | None
) -> AsyncGenerator[bytes]:
    with service.running():
        if speculated is None:
            counter = StreamedTokens()
            async with aclosing(service.upstream.events(call.path, call.fields)) as passed:
                async for event in passed:
                    service.counts.passed_tokens += counter.add(event)
                    yield event
            return
        writer = AnswerWriter(call.body, speculated)
        async with aclosing(speculated.events()) as events:
            async for event in events:
                for chunk in writer.chunks(event):
                    yield server_sent(chunk)
        for chunk in writer.closing():
            yield server_sent(chunk)
        yield DONE


# ---- errors


def _failed(error: TinkercloudError) -> bytes:
    """The last event of a stream that an error ends."""
    return server_sent(_error(error)[1])


def _error(error: TinkercloudError) -> tuple[int, object]:
    """What the target says of a request is handed on where the request is at fault."""
    if isinstance(error, UpstreamRefused) and error.answer_status in FAULTS_OF_REQUESTS:
        with suppress(ValueError):
            return error.answer_status, json.loads(error.answer)
    status = 400 if error.status == InvalidRequest.status else error.status
    field = error.field if isinstance(error, InvalidField) else None
    return status, error_body(status, str(error), error, field)


async def _named_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TinkercloudError)
    status, body = _error(error)
    if status >= 500:
        logger.error("%s %s: %s", request.method, request.url.path, error)
    headers = {"retry-after": "1"} if isinstance(error, TooManyRequests) else None
    return JSONResponse(body, status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"this proxy has no {request.method} {request.url.path[:200]}"
    return JSONResponse(error_body(error.status_code, text), error.status_code)
