"""Waiting for results: the client's form, and a plainer one for other HTTP clients."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from tinker_gmi.types import (
    CancelFutureRequest,
    CleanupFuturesRequest,
    CleanupFuturesResponse,
    FutureRetrieveRequest,
    FuturesRetrieveRequest,
)
from tinkercloud.routers.deps import (
    ANYTHING,
    AcceptDep,
    OwnerDep,
    ReaderDep,
    ServicesDep,
    UserDep,
    acting_owner,
    answer,
    json_answer,
)
from tinkercloud.routers.http.json_route import JsonRoute
from tinkercloud.routers.http.result_response import result_response
from tinkercloud.services.results.result_answer import ResultAnswer
from tinkercloud.storage.futures import PROTOBUF_TYPE

router = APIRouter(prefix="/api/v1", route_class=JsonRoute)


def _takes(accept: str, content_type: str) -> bool:
    """Whether an Accept header (RFC 9110, section 12.5.1) names this type; weights are not read."""
    ranges = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
    family = content_type.partition("/")[0] + "/*"
    return not ranges.isdisjoint({content_type, family, ANYTHING})


@router.post("/retrieve_future")
async def retrieve_future(
    body: FutureRetrieveRequest,
    user: ReaderDep,
    services: ServicesDep,
    accept: AcceptDep,
    request: Request,
) -> Response:
    """408 while pending: the client polls again at once. A 200 would log a warning at each poll
    (wire specification, section 4.2). SDKs up to 0.18.0 accept JSON alone."""
    protobuf = _takes(accept, PROTOBUF_TYPE)
    result = await services.results.wait(user, body.request_id, protobuf=protobuf)
    if result is None:
        return answer(services.results.try_again(body.request_id), 408)
    return result_response(request, result)


@router.post("/retrieve_futures")
async def retrieve_futures(
    body: FuturesRetrieveRequest, user: ReaderDep, services: ServicesDep
) -> Response:
    """One poll for all samples of a sampling session; clients use it where client/config has
    `sample_use_retrieve_futures` (wire specification, section 4.5)."""
    await services.sampling.require(user, body.target.sampling_session_id)
    return answer(await services.completions.completions(user, body))


@router.post("/cancel_future")
async def cancel_future(
    body: CancelFutureRequest, request: Request, services: ServicesDep
) -> Response:
    owner = await acting_owner(request, "request", body.request_id)
    await services.completions.cancel(owner, body.request_id)
    return json_answer({})


@router.get("/retrieve_future/{request_id}")
@router.post("/retrieve_future/{request_id}")
async def future_status(
    request_id: str,
    user: OwnerDep,
    services: ServicesDep,
    request: Request,
    wait_s: Annotated[float, Query(ge=0)] = 0.0,
) -> Response:
    status = await services.results.status(user, request_id, wait_s)
    if isinstance(status, ResultAnswer):
        return result_response(request, status)
    return json_answer(status.model_dump(mode="json"))  # with nulls: each is part of it


@router.post("/cleanup_futures")
async def cleanup_futures(
    body: CleanupFuturesRequest, user: UserDep, services: ServicesDep
) -> Response:
    return answer(CleanupFuturesResponse(num_deleted=await services.results.cleanup(user, body)))
