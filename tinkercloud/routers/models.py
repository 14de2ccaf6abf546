"""Creating, loading, describing and deleting models."""

from fastapi import APIRouter, Response

from tinker_gmi.types import (
    CreateModelRequest,
    DeleteModelRequest,
    DeleteModelResponse,
    GetInfoRequest,
    LoadWeightsRequest,
)
from tinkercloud.routers.deps import LocalDep, ServicesDep, UserDep, answer
from tinkercloud.routers.json_route import JsonRoute

router = APIRouter(prefix="/api/v1", route_class=JsonRoute)


@router.post("/create_model")
async def create_model(body: CreateModelRequest, user: UserDep, services: ServicesDep) -> Response:
    return answer(await services.models.create(user, body))


@router.post("/load_weights")
async def load_weights(body: LoadWeightsRequest, user: UserDep, services: ServicesDep) -> Response:
    return answer(await services.models.load(user, body))


@router.post("/get_info")
async def get_info(
    body: GetInfoRequest, user: UserDep, services: ServicesDep, local: LocalDep
) -> Response:
    return answer(await services.models.get_info(user, body.model_id, local=local))


@router.post("/delete_model")
async def delete_model(body: DeleteModelRequest, user: UserDep, services: ServicesDep) -> Response:
    await services.models.delete(user, body.model_id)
    return answer(DeleteModelResponse(model_id=body.model_id))


@router.post("/unload_model")
async def unload_model(body: DeleteModelRequest, user: UserDep, services: ServicesDep) -> Response:
    return answer(await services.models.unload(user, body.model_id))
