"""Capture sessions: making them, reading what they hold, rewards."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from tinker_gmi.bodies.captures import (
    LABEL,
    CaptureRewardRequest,
    ChangeCaptureRequest,
    CloseCaptureRequest,
    CreateCaptureRequest,
)
from tinkercloud.captures.rewards import Advantages
from tinkercloud.captures.trajectories import Branches
from tinkercloud.routers.deps import (
    LimitDep,
    OffsetDep,
    OwnerDep,
    ServicesDep,
    UserDep,
    json_answer,
)
from tinkercloud.routers.http.json_route import JsonRoute
from tinkercloud.services.captures.capture_recorder import TurnPlace
from tinkercloud.services.captures.capture_results import DatumQuery, TrajectoryQuery
from tinkercloud.services.captures.capture_service import capture_json
from tinkercloud.storage.captures import Capture

router = APIRouter(prefix="/api/v1/captures", route_class=JsonRoute)

LabelQuery = Annotated[str | None, Query(pattern=LABEL)]


async def server_url(request: Request) -> str:
    """As the client wrote it."""
    return str(request.base_url).rstrip("/")


async def trajectory_query(
    branches: Branches = "continued",
    group: LabelQuery = None,
    episode: LabelQuery = None,
    limit: LimitDep = 1000,
    offset: OffsetDep = 0,
) -> TrajectoryQuery:
    return TrajectoryQuery(branches, group, episode, limit, offset)


async def datum_query(
    loss: str = "importance_sampling", advantages: Advantages = "centered"
) -> DatumQuery:
    return DatumQuery(loss, advantages)


UrlDep = Annotated[str, Depends(server_url)]
TrajectoryQueryDep = Annotated[TrajectoryQuery, Depends(trajectory_query)]
DatumQueryDep = Annotated[DatumQuery, Depends(datum_query)]


def _answer(capture: Capture, url: str, **more: Any) -> Response:
    return json_answer(capture_json(capture, url) | more)


@router.post("")
async def create(
    body: CreateCaptureRequest, user: UserDep, services: ServicesDep, url: UrlDep
) -> Response:
    capture = await services.captures.sessions.create(user, body)
    secret = capture.details.get("webhook_secret")  # shown this once
    return _answer(capture, url, **({} if secret is None else {"webhook_secret": secret}))


@router.get("")
async def listing(
    user: UserDep,
    services: ServicesDep,
    url: UrlDep,
    limit: LimitDep = 100,
    offset: OffsetDep = 0,
) -> Response:
    captures = await services.captures.sessions.page(user, limit, offset)
    return json_answer({"captures": [capture_json(capture, url) for capture in captures]})


@router.get("/{capture_id}")
async def get(capture_id: str, user: OwnerDep, services: ServicesDep, url: UrlDep) -> Response:
    return _answer(await services.captures.sessions.require(user, capture_id), url)


@router.patch("/{capture_id}")
async def change(
    capture_id: str,
    body: ChangeCaptureRequest,
    user: UserDep,
    services: ServicesDep,
    url: UrlDep,
) -> Response:
    return _answer(await services.captures.sessions.change(user, capture_id, body), url)


@router.delete("/{capture_id}")
async def delete(capture_id: str, user: OwnerDep, services: ServicesDep) -> Response:
    await services.captures.sessions.delete(user, capture_id)
    return Response(status_code=204)


@router.post("/{capture_id}/close")
async def close(
    capture_id: str,
    body: CloseCaptureRequest,
    user: UserDep,
    services: ServicesDep,
    url: UrlDep,
) -> Response:
    place = TurnPlace(body.group, body.episode)
    return _answer(await services.captures.sessions.close(user, capture_id, place), url)


@router.post("/{capture_id}/rewards")
async def reward(
    capture_id: str, body: CaptureRewardRequest, user: UserDep, services: ServicesDep
) -> Response:
    target = await services.captures.results.reward(user, capture_id, body)
    return json_answer({"target": target, "value": body.value})


@router.get("/{capture_id}/trajectories")
async def trajectories(
    capture_id: str, query: TrajectoryQueryDep, user: UserDep, services: ServicesDep
) -> Response:
    trajectories = await services.captures.results.trajectories(user, capture_id, query)
    return json_answer({"trajectories": trajectories})


@router.get("/{capture_id}/datums")
async def datums(
    capture_id: str,
    query: TrajectoryQueryDep,
    form: DatumQueryDep,
    user: UserDep,
    services: ServicesDep,
) -> Response:
    return json_answer(await services.captures.results.datums(user, capture_id, query, form))
