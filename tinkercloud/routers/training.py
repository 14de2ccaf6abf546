"""forward_backward in both of its forms, forward, optim_step."""

import asyncio

from fastapi import APIRouter, Request, Response
from google.protobuf.message import DecodeError
from pydantic import ValidationError

from tinker_gmi.types import (
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
    OptimStepRequest,
    UntypedAPIFuture,
)
from tinkercloud.core.data_converter import RawBatch, raw_datum
from tinkercloud.errors import InvalidRequest, UserError
from tinkercloud.routers.deps import (
    INLINE_BYTES,
    JsonRoute,
    ServicesDep,
    UserDep,
    answer,
    parse_json,
)
from tinkercloud.routers.validation import readable
from tinkercloud.services.container import Services
from tinkercloud.storage.futures import PROTOBUF_TYPE
from tinkercloud.wire import tinker_pb2
from tinkercloud.wire.codec import WireError, decode_forward_backward_request

router = APIRouter(prefix="/api/v1", route_class=JsonRoute)

_Call = tuple[str, int | None, RawBatch]  # model_id, seq_id, data


@router.post("/forward_backward")
async def forward_backward(request: Request, user: UserDep, services: ServicesDep) -> Response:
    body = await request.body()
    if request.headers.get("content-type", "").startswith(PROTOBUF_TYPE):
        return answer(await _protobuf_call(user, services, body))
    return await _json_call(request, user, services, forward_only=False)


@router.post("/forward")
async def forward(request: Request, user: UserDep, services: ServicesDep) -> Response:
    return await _json_call(request, user, services, forward_only=True)


@router.post("/optim_step")
async def optim_step(body: OptimStepRequest, user: UserDep, services: ServicesDep) -> Response:
    return answer(await services.training.optim_step(user, body))


async def _protobuf_call(user: str, services: Services, body: bytes) -> UntypedAPIFuture:
    try:
        if len(body) <= INLINE_BYTES:
            call = _from_protobuf(body)
        else:
            call = await asyncio.to_thread(_from_protobuf, body)
    except WireError as error:
        return await _refused(user, services, body, error)
    return await services.training.forward_backward(user, *call)


def _from_protobuf(body: bytes) -> _Call:
    message = decode_forward_backward_request(body)
    raw = RawBatch(message.data, message.loss_fn, message.loss_fn_config, message.forward_only)
    return message.model_id, message.seq_id or None, raw


async def _refused(
    user: str, services: Services, body: bytes, error: WireError
) -> UntypedAPIFuture:
    """A message with faulty tensors still uses up its number; other bytes are no request at all."""
    try:
        message = await asyncio.to_thread(tinker_pb2.ForwardBackwardRequest.FromString, body)
    except (DecodeError, UnicodeDecodeError):
        raise UserError(str(error)) from None
    if not await services.training.knows_model(user, message.model_id):
        raise UserError(str(error)) from None
    kind = "Forward" if message.forward_only else "ForwardBackward"
    return await services.training.refuse(
        user, kind, message.model_id, message.seq_id or None, InvalidRequest(str(error))
    )


async def _json_call(
    request: Request, user: str, services: Services, *, forward_only: bool
) -> Response:
    content_type = request.headers.get("content-type", "")
    if not content_type.startswith("application/json"):
        raise UserError(f"content type {content_type!r} is not taken here; send application/json")
    body = await request.body()
    call = await asyncio.to_thread(_from_json, body, forward_only=forward_only)
    return answer(await services.training.forward_backward(user, *call))


def _from_json(body: bytes, *, forward_only: bool) -> _Call:
    value = parse_json(body)
    try:
        if forward_only:
            forward_request = ForwardRequest.model_validate(value)
            model_id, seq_id = forward_request.model_id, forward_request.seq_id
            return model_id, seq_id, _raw(forward_request.forward_input, forward_only=True)
        both = ForwardBackwardRequest.model_validate(value)
        raw = _raw(both.forward_backward_input, forward_only=False)
        return both.model_id, both.seq_id, raw
    except ValidationError as error:
        raise InvalidRequest(readable(error.errors())) from None
    except WireError as error:
        raise InvalidRequest(str(error)) from None


def _raw(sent: ForwardBackwardInput, *, forward_only: bool) -> RawBatch:
    data = [raw_datum(datum) for datum in sent.data]
    return RawBatch(data, sent.loss_fn, sent.loss_fn_config or {}, forward_only)
