"""Creating, loading, describing and deleting models."""

from fastapi import APIRouter, Request, Response

from tinker_gmi.types import (
    CreateModelRequest,
    DeleteModelRequest,
    DeleteModelResponse,
    GetInfoRequest,
    LoadWeightsRequest,
)
from tinkercloud.routers.deps import LocalDep, ReaderDep, ServicesDep, UserDep, acting_owner, answer
from tinkercloud.routers.http.json_route import JsonRoute

router = APIRouter(prefix="/api/v1", route_class=JsonRoute)


@router.post("/create_model")
async def create_model(body: CreateModelRequest, user: UserDep, services: ServicesDep) -> Response:
    return answer(await services.models.create(user, body))


@router.post("/load_weights")
async def load_weights(body: LoadWeightsRequest, user: UserDep, services: ServicesDep) -> Response:
    return answer(await services.models.load(user, body))


@router.post("/get_info")
async def get_info(
    body: GetInfoRequest, user: ReaderDep, services: ServicesDep, local: LocalDep
) -> Response:
    return answer(await services.models.get_info(user, body.model_id, local=local))


@router.post("/delete_model")
async def delete_model(
    body: DeleteModelRequest, request: Request, services: ServicesDep
) -> Response:
    owner = await acting_owner(request, "model", body.model_id)
    await services.models.delete(owner, body.model_id)
    return answer(DeleteModelResponse(model_id=body.model_id))


@router.post("/unload_model")
async def unload_model(
    body: DeleteModelRequest, request: Request, services: ServicesDep
) -> Response:
    owner = await acting_owner(request, "model", body.model_id)
    return answer(await services.models.unload(owner, body.model_id))
