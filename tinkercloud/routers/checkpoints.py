"""Saving weights, and what is known about them."""

from fastapi import APIRouter, Response

from tinker_gmi.types import SaveWeightsForSamplerRequest, SaveWeightsRequest, WeightsInfoRequest
from tinkercloud.routers.deps import ReaderDep, ServicesDep, UserDep, answer
from tinkercloud.routers.http.json_route import JsonRoute

router = APIRouter(prefix="/api/v1", route_class=JsonRoute)


@router.post("/save_weights")
async def save_weights(body: SaveWeightsRequest, user: UserDep, services: ServicesDep) -> Response:
    return answer(await services.training.save_weights(user, body))


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(
    body: SaveWeightsForSamplerRequest, user: UserDep, services: ServicesDep
) -> Response:
    return answer(await services.training.save_weights_for_sampler(user, body))


@router.post("/weights_info")
async def weights_info(
    body: WeightsInfoRequest, user: ReaderDep, services: ServicesDep
) -> Response:
    return answer(await services.checkpoints.weights_info(user, body.tinker_path))
