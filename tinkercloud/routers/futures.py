"""Waiting for results: the client's form, and a plainer one for other HTTP clients."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from tinker_gmi.types import (
    CleanupFuturesRequest,
    CleanupFuturesResponse,
    FutureRetrieveRequest,
)
from tinkercloud.routers.deps import JsonRoute, ServicesDep, UserDep, answer, json_answer

router = APIRouter(prefix="/api/v1", route_class=JsonRoute)


@router.post("/retrieve_future")
async def retrieve_future(
    body: FutureRetrieveRequest, user: UserDep, services: ServicesDep
) -> Response:
    """408 while pending: the client polls again at once. A 200 would log a warning at each poll
    (wire specification, section 4.2)."""
    outcome = await services.results.wait(user, body.request_id)
    if outcome is None:
        return answer(services.results.try_again(body.request_id), 408)
    return Response(outcome.body, media_type=outcome.content_type)


@router.get("/retrieve_future/{request_id}")
@router.post("/retrieve_future/{request_id}")
async def future_status(
    request_id: str,
    user: UserDep,
    services: ServicesDep,
    wait_s: Annotated[float, Query(ge=0)] = 0.0,
) -> Response:
    status = await services.results.status(user, request_id, wait_s)
    return json_answer(status.model_dump(mode="json"))  # with nulls: each is part of it


@router.post("/cleanup_futures")
async def cleanup_futures(
    body: CleanupFuturesRequest, user: UserDep, services: ServicesDep
) -> Response:
    return answer(CleanupFuturesResponse(num_deleted=await services.results.cleanup(user, body)))
