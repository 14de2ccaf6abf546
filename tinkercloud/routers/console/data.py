"""What the console's page reads, beside the API's own listings; and its chat box."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from tinkercloud.errors import TinkercloudError
from tinkercloud.event_stream import EventStream, server_sent
from tinkercloud.openai_api.bodies import ChatBody
from tinkercloud.routers.console.cookie import CHAT_PATH
from tinkercloud.routers.console.page import renew_cookie
from tinkercloud.routers.deps import (
    CONSOLE_PATH,
    ObservedDep,
    OwnerDep,
    ReaderDep,
    ServicesDep,
    UserDep,
    json_answer,
)
from tinkercloud.routers.http.json_route import JsonRoute
from tinkercloud.routers.openai import answer_chat
from tinkercloud.services.container import Services
from tinkercloud.services.results.reported_curves import described
from tinkercloud.storage.reported_metrics import ReportedPoint

router = APIRouter(route_class=JsonRoute, include_in_schema=False)

INTERVAL_S = 2.0
NUM_EVENTS = 300  # then the page asks again, and its key is checked again
MAX_SAMPLES = 100
MAX_REPORTED = 500  # points of one event
RETRY = b"retry: 2000\n\n"

SamplesQuery = Annotated[int, Query(ge=1, le=MAX_SAMPLES)]


@router.get(CONSOLE_PATH + "/events")
async def events(
    observed: ObservedDep, reader: ReaderDep, request: Request, services: ServicesDep
) -> Response:
    """The server as it is, every INTERVAL_S."""
    stream = EventStream(_live(services, observed), _failed)
    renew_cookie(stream, request, services)
    return stream


async def _live(services: Services, observed: str | None) -> AsyncGenerator[bytes, None]:
    yield RETRY
    for _ in range(NUM_EVENTS):
        yield server_sent(services.live.snapshot(observed), "server")
        if not await _pause(services):
            return


@router.get(CONSOLE_PATH + "/runs/{run_id}/events")
async def run_events(
    run_id: str, user: OwnerDep, services: ServicesDep, after_step: int = 0
) -> Response:
    """The points of a run's curves, and what its script reported: those that there are, then new
    ones."""
    await services.rest.training_run(user, run_id)  # refuses another user's
    return EventStream(_curve(services, user, run_id, after_step), _failed)


async def _curve(
    services: Services, user: str, run_id: str, after_step: int
) -> AsyncGenerator[bytes, None]:
    yield RETRY
    after_change = 0
    for number in range(NUM_EVENTS):
        points = await services.curves.points(user, run_id, after_step)
        if points or number == 0:
            yield server_sent([point.described() for point in points], "points")
        after_step = points[-1].step if points else after_step
        async for reported in _reported(services, user, run_id, after_change):
            yield server_sent([described(point) for point in reported], "reported")
            after_change = reported[-1].number
        if not await _pause(services):
            return


async def _reported(
    services: Services, user: str, run_id: str, after: int
) -> AsyncGenerator[list[ReportedPoint], None]:
    """Those with a higher number than `after`, some at a time."""
    while points := await services.reported_curves.points(user, run_id, after, MAX_REPORTED):
        yield points
        after = points[-1].number


def _failed(error: TinkercloudError) -> bytes:
    return server_sent({"detail": str(error)}, "failed")


async def _pause(services: Services) -> bool:
    """Whether to go on; False: the server stops."""
    if services.tasks.is_closing:
        return False
    pause = services.tasks.spawn(asyncio.sleep(INTERVAL_S), "pause of the console's events")
    await asyncio.wait([pause])
    return not pause.cancelled()


@router.get(CONSOLE_PATH + "/samples")
async def samples(user: ReaderDep, services: ServicesDep, limit: SamplesQuery = 20) -> Response:
    return json_answer({"samples": await services.chats.sample_texts.newest(user, limit)})


@router.post(CHAT_PATH)
async def chat(body: ChatBody, request: Request, user: UserDep, services: ServicesDep) -> Response:
    """As OpenAI's chat completions."""
    return await answer_chat(services, user, body, request)
