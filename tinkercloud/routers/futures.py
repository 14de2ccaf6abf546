"""Waiting for results: the client's form, and a plainer one for other HTTP clients."""

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response

from tinker_gmi.types import (
    CleanupFuturesRequest,
    CleanupFuturesResponse,
    FutureRetrieveRequest,
    FutureStatusResponse,
    TryAgainResponse,
)
from tinkercloud.core.task_manager import is_sampling
from tinkercloud.routers.deps import JsonRoute, ServicesDep, UserDep, answer
from tinkercloud.storage.futures import PROTOBUF_TYPE, Outcome
from tinkercloud.wire.json_view import sample_output_json, train_output_json

router = APIRouter(prefix="/api/v1", route_class=JsonRoute)


@router.post("/retrieve_future")
async def retrieve_future(
    body: FutureRetrieveRequest, user: UserDep, services: ServicesDep
) -> Response:
    """408 while pending: the client asks again at once and in silence."""
    outcome = await services.tasks.wait(body.request_id, user, services.config.hold_s)
    if outcome is None:
        return answer(TryAgainResponse(request_id=body.request_id), 408)
    return Response(outcome.body, media_type=outcome.content_type)


@router.get("/retrieve_future/{request_id}")
@router.post("/retrieve_future/{request_id}")
async def future_status(
    request_id: str,
    user: UserDep,
    services: ServicesDep,
    wait_s: Annotated[float, Query(ge=0)] = 0.0,
) -> Response:
    hold_s = min(wait_s, services.config.hold_s)
    outcome = await services.tasks.wait(request_id, user, hold_s)
    status: Literal["pending", "completed", "failed"] = (
        "pending" if outcome is None else outcome.status
    )
    result = None if outcome is None else _json_view(request_id, outcome)
    return answer(FutureStatusResponse(request_id=request_id, status=status, result=result))


def _json_view(request_id: str, outcome: Outcome) -> dict[str, Any]:
    if outcome.content_type != PROTOBUF_TYPE:
        return json.loads(outcome.body)
    view = sample_output_json if is_sampling(request_id) else train_output_json
    return view(outcome.body)


@router.post("/cleanup_futures")
async def cleanup_futures(
    body: CleanupFuturesRequest, user: UserDep, services: ServicesDep
) -> Response:
    num_deleted = await services.futures.delete_finished(user, body.request_ids, body.model_id)
    return answer(CleanupFuturesResponse(num_deleted=num_deleted))
