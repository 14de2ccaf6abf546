"""forward_backward in both of its forms, forward, optim_step."""

import asyncio
from functools import partial

from fastapi import APIRouter, Request, Response

from tinker_gmi.types import CreateCustomLossRequest, OptimStepRequest
from tinkercloud.errors import UserError
from tinkercloud.routers.deps import ServicesDep, UserDep, answer
from tinkercloud.routers.http.json_route import (
    INLINE_BYTES,
    MAX_TRAINING_JSON_BYTES,
    JsonRoute,
    parsed,
)
from tinkercloud.services.common.bodies import TrainingCall, json_call, protobuf_call

router = APIRouter(prefix="/api/v1", route_class=JsonRoute)


async def _call(request: Request, *, forward_only: bool) -> TrainingCall:
    content_type = request.headers.get("content-type", "")
    body = await request.body()
    if content_type.startswith("application/json"):
        decode = partial(json_call, forward_only=forward_only)
        return await parsed(request, decode, body, MAX_TRAINING_JSON_BYTES)
    if not content_type.startswith("application/x-protobuf") or forward_only:
        raise UserError(f"content type {content_type!r} is not taken here; send application/json")
    if len(body) <= INLINE_BYTES:
        return protobuf_call(body)
    return await asyncio.to_thread(protobuf_call, body)


@router.post("/forward_backward")
async def forward_backward(request: Request, user: UserDep, services: ServicesDep) -> Response:
    call = await _call(request, forward_only=False)
    return answer(await services.training.forward_backward(user, call))


@router.post("/forward")
async def forward(request: Request, user: UserDep, services: ServicesDep) -> Response:
    call = await _call(request, forward_only=True)
    return answer(await services.training.forward_backward(user, call))


@router.post("/create_custom_loss")
async def create_custom_loss(
    body: CreateCustomLossRequest, user: UserDep, services: ServicesDep
) -> Response:
    return answer(await services.losses.create(user, body))


@router.post("/optim_step")
async def optim_step(body: OptimStepRequest, user: UserDep, services: ServicesDep) -> Response:
    return answer(await services.training.optim_step(user, body))
