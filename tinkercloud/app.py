"""Puts the server together: storage, backend, services, routes."""

import importlib
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from tinkercloud.backends import BACKENDS
from tinkercloud.backends.base import Backend
from tinkercloud.config import Config
from tinkercloud.errors import (
    ConfigError,
    DatabaseDamaged,
    FutureUnknown,
    TinkercloudError,
)
from tinkercloud.routers import ROUTERS
from tinkercloud.routers.deps import json_answer
from tinkercloud.routers.http.body_budget import BodyBudget
from tinkercloud.routers.http.error_forms import error_answer, retry_headers
from tinkercloud.routers.http.json_route import InvalidBody
from tinkercloud.routers.http.middleware import Authenticator, AuthMiddleware
from tinkercloud.routers.http.request_body import BodyMiddleware
from tinkercloud.services.common.bodies import fault_text
from tinkercloud.services.common.catalog import Catalog
from tinkercloud.services.container import Services
from tinkercloud.services.wiring import Stores, build_services
from tinkercloud.storage.connections import SQLITE, Connector
from tinkercloud.storage.database import Database
from tinkercloud.storage.keys import DEFAULT_USER, KeyStore

logger = logging.getLogger(__name__)


def create_app(
    config: Config,
    backend: Backend | None = None,
    *,
    client_config: Mapping[str, object] | None = None,
    connector: Connector = SQLITE,
) -> FastAPI:
    """The ASGI application. backend None: the one that config names. connector: opens the database.

    client_config: flags for official clients (wire specification, sections 2.1 and 2.2); where it
    names none, they keep their own defaults (but see services/common/client_flags.py).
    """
    chosen = load_backend(config) if backend is None else backend
    authenticator = Authenticator(everybody=None if config.auth else DEFAULT_USER)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        database = await Database.open(config.data_dir, connector)
        try:
            with closing(KeyStore(config.data_dir, connector)) as keys:
                authenticator.keys = keys
                served = await chosen.start()
                try:
                    catalog = Catalog(served, config.aliases, config.max_topk_logprobs)
                    stores = Stores(database, keys)
                    flags = {**_flags(config), **(client_config or {})}
                    services = build_services(config, flags, chosen, catalog, stores)
                    await _start(services)
                    app.state.services = services
                    try:
                        yield
                    finally:
                        await services.close()
                finally:
                    await chosen.stop()
        finally:  # its thread would keep the process
            await database.close()

    # Not FastAPI's document and pages: ours is a route like others (routers/api_document.py).
    app = FastAPI(title="tinkercloud", openapi_url=None, lifespan=lifespan)
    budget = BodyBudget(config.body_memory_bytes or 2 * config.max_body_bytes)
    app.add_middleware(BodyMiddleware, max_body_bytes=config.max_body_bytes, budget=budget)
    app.add_middleware(AuthMiddleware, authenticator=authenticator)  # the one added last runs first
    for router in ROUTERS:
        # Not include_router: it would look for the router of a request, then for its route.
        app.router.routes.extend(router.routes)
    app.add_exception_handler(TinkercloudError, _named_error)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http_error)
    return app


async def _start(services: Services) -> None:
    """Raises ConfigError for a database that cannot be read: no server can go on with it."""
    try:
        await services.start()
    except DatabaseDamaged as error:
        raise ConfigError(str(error)) from error


def _flags(config: Config) -> dict[str, object]:
    """Flags for official clients that settings decide."""
    return {"custom_loss_server_side": True} if config.server_losses else {}


def load_backend(config: Config) -> Backend:
    """The backend that config names; ConfigError when there is none of that name."""
    if config.backend not in BACKENDS:
        raise ConfigError(f"backend {config.backend!r} is not known; known: {', '.join(BACKENDS)}")
    module, _, name = BACKENDS[config.backend].partition(":")
    backend = getattr(importlib.import_module(module), name)(config)
    assert isinstance(backend, Backend)
    if config.pool is None:
        return backend
    from tinkercloud.pool.sampling.backend import PooledBackend  # few servers have a pool

    return PooledBackend(backend, config.pool, config.data_dir / "pools" / "tokenizers")


async def _named_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TinkercloudError)
    status = error.status
    if isinstance(error, FutureUnknown):  # a sample is then sent again (specification, section 4.4)
        status = 410 if error.sampling or _asks_for_sample(request) else 404
    if status >= 500:
        logger.error("%s %s: %s", request.method, request.url.path, error)
    response = _error(request, status, str(error), error)
    response.headers.update(retry_headers(error))
    return response


def _asks_for_sample(request: Request) -> bool:
    return request.headers.get("x-tinker-request-type") == "Sample"


async def _invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    num_errors = error.num_errors if isinstance(error, InvalidBody) else None
    return _error(request, 422, fault_text(error.errors(), num_errors), error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    unrouted = error.detail in (HTTPStatus.NOT_FOUND.phrase, HTTPStatus.METHOD_NOT_ALLOWED.phrase)
    text = _no_route(request) if unrouted else str(error.detail)
    response = _error(request, error.status_code, text, error)
    response.headers.update(error.headers or {})
    return response


def _no_route(request: Request) -> str:
    """For whoever calls what other servers or other versions have."""
    return (
        f"this server has no {request.method} {request.url.path[:200]}; docs/api.md has its calls, "
        "docs/move.md the clients that it is tested with: upgrade the older of the two"
    )


def _error(request: Request, status: int, text: str, error: Exception) -> Response:
    status, body = error_answer(request.url.path, status, text, error)
    return json_answer(body, status)
