"""Request bodies that need more than their shape checked: JSON text, and training data."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError

from tinker_gmi.types import ForwardBackwardInput, ForwardBackwardRequest, ForwardRequest
from tinkercloud.core.raw_batch import RawBatch, raw_datum
from tinkercloud.errors import InvalidRequest, UserError
from tinkercloud.wire import tinker_pb2
from tinkercloud.wire.codec import WireError, decode_forward_backward_request

MAX_FAULTS = 5

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class TrainingCall:
    """A forward_backward request. fault: why its data cannot be read, where that is so."""

    model_id: str
    seq_id: int | None
    raw: RawBatch
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with a body: the first few errors as pydantic has them, and how many there
    are."""

    first: Sequence[Mapping[str, Any]]
    num_errors: int


def fault_text(errors: Sequence[Mapping[str, Any]], num_errors: int | None = None) -> str:
    """What is wrong and where, in one line; values are left out, they may be large or secret.
    num_errors: where not all are there."""
    faults = [_fault(error) for error in errors[:MAX_FAULTS]]
    more = (len(errors) if num_errors is None else num_errors) - MAX_FAULTS
    return "; ".join(faults) + (f"; and {more} more" if more > 0 else "")


def _fault(error: Mapping[str, Any]) -> str:
    if error["type"] == "json_invalid":  # parse_json's own text, with its place
        return str(error.get("ctx", {}).get("error", error["msg"]))
    return f"{'.'.join(str(part) for part in error['loc']) or 'body'}: {error['msg']}"


def parse_json(body: bytes) -> Any:
    """Any JSON value that can travel back as text; UserError otherwise."""
    try:
        value = json.loads(body)
        if b"\\ud" in body or b"\\uD" in body:  # half a surrogate pair is no text
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)[:200]
        raise UserError(f"the body is not JSON: {reason}") from None
    return value


def validated(model: type[M], body: bytes) -> M | Faults:
    """UserError where it is no JSON."""
    value = parse_json(body)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        return Faults([dict(error) for error in errors[:MAX_FAULTS]], len(errors))


def protobuf_call(body: bytes) -> TrainingCall:
    """UserError for bytes that are no message; a message with faulty tensors has a `fault`."""
    try:
        message = decode_forward_backward_request(body)
    except WireError as error:
        return _faulty_call(body, str(error))
    raw = RawBatch(message.data, message.loss_fn, message.loss_fn_config, message.forward_only)
    return TrainingCall(message.model_id, message.seq_id or None, raw)


def _faulty_call(body: bytes, fault: str) -> TrainingCall:
    try:
        message = tinker_pb2.ForwardBackwardRequest.FromString(body)
    except (DecodeError, UnicodeDecodeError):
        raise UserError(fault) from None
    raw = RawBatch((), message.loss_fn, {}, message.forward_only)
    return TrainingCall(message.model_id, message.seq_id or None, raw, fault)


def json_call(body: bytes, *, forward_only: bool) -> TrainingCall:
    """The form with `forward_backward_input`, or `forward_input` for forward_only: clients up to
    version 0.24 send it (wire specification, section 15)."""
    value = parse_json(body)
    try:
        if forward_only:
            forward = ForwardRequest.model_validate(value)
            raw = _raw(forward.forward_input, forward_only=True)
            return TrainingCall(forward.model_id, forward.seq_id, raw)
        both = ForwardBackwardRequest.model_validate(value)
        raw = _raw(both.forward_backward_input, forward_only=False)
        return TrainingCall(both.model_id, both.seq_id, raw)
    except ValidationError as error:
        raise InvalidRequest(fault_text(error.errors())) from None
    except WireError as error:
        raise InvalidRequest(str(error)) from None


def _raw(batch: ForwardBackwardInput, *, forward_only: bool) -> RawBatch:
    data = [raw_datum(datum) for datum in batch.data]
    return RawBatch(data, batch.loss_fn, batch.loss_fn_config or {}, forward_only)
