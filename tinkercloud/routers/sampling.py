"""Sampling sessions and samples."""

from typing import Any

from fastapi import APIRouter, Response
from pydantic import ValidationError

from tinker_gmi.types import (
    CreateSamplingClientRequest,
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
    SampleRequest,
)
from tinkercloud.errors import InvalidRequest
from tinkercloud.routers.deps import LocalDep, OwnerDep, ServicesDep, UserDep, answer
from tinkercloud.routers.http.json_route import JsonRoute
from tinkercloud.services.common.bodies import fault_text

router = APIRouter(prefix="/api/v1", route_class=JsonRoute)


@router.post("/create_sampling_session")
async def create_sampling_session(
    body: CreateSamplingSessionRequest, user: UserDep, services: ServicesDep
) -> Response:
    sampler_id = await services.sampling.create(user, body)
    return answer(CreateSamplingSessionResponse(sampling_session_id=sampler_id))


@router.post("/create_sampling_client")
async def create_sampling_client(
    body: dict[str, Any], user: UserDep, services: ServicesDep
) -> Response:
    """create_sampling_session by another name; without a number it needs no session either."""
    try:
        if "sampling_session_seq_id" in body:
            numbered = CreateSamplingSessionRequest.model_validate(body)
            sampler_id = await services.sampling.create(user, numbered)
        else:
            alone = CreateSamplingClientRequest.model_validate(body)
            sampler_id = await services.sampling.create_alone(user, alone)
    except ValidationError as error:
        raise InvalidRequest(fault_text(error.errors())) from None
    return answer(CreateSamplingSessionResponse(sampling_session_id=sampler_id))


@router.post("/join_sampling_session")
async def join_sampling_session(
    body: JoinSamplingSessionRequest, user: UserDep, services: ServicesDep
) -> Response:
    number = await services.sampling.join(user, body.sampling_session_id)
    return answer(JoinSamplingSessionResponse(client_counter=number))


@router.get("/samplers/{sampler_id}")
async def get_sampler(
    sampler_id: str, user: OwnerDep, services: ServicesDep, local: LocalDep
) -> Response:
    return answer(await services.sampling.info(user, sampler_id, local=local))


@router.post("/asample")
@router.post("/sample")
async def asample(body: SampleRequest, user: UserDep, services: ServicesDep) -> Response:
    return answer(await services.sampling.sample(user, body))
