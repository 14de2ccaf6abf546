"""Training data on record: what an operation asks for, with everything resolved, as bytes.

A header of JSON, then the arrays one after the other, little-endian. It says nothing that the wire
format says: that one has names to resolve, defaults to fill in and faults to find.
"""

import json
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkercloud.core.types import Datum, TrainBatch
from tinkercloud.errors import TinkercloudError, error_of

FORMAT = 1
_LENGTH = struct.Struct("<I")


def encode_batch(batch: TrainBatch) -> bytes:
    arrays: list[NDArray[Any]] = []
    header = {
        "format": FORMAT,
        "loss_fn": batch.loss_fn,
        "config": dict(batch.loss_fn_config),
        "forward_only": batch.forward_only,
        "custom_loss": batch.custom_loss,
        "data": [_described(datum, arrays) for datum in batch.data],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *(array.tobytes() for array in arrays)])


def encode_fault(error: TinkercloudError) -> bytes:
    """Instead of a batch: why its data is refused when its turn comes."""
    fault = {"format": FORMAT, "fault": [type(error).__name__, str(error)]}
    text = json.dumps(fault).encode()
    return _LENGTH.pack(len(text)) + text


def decode_batch(request: bytes) -> TrainBatch:
    """Its arrays are views of `request`. Raises the error of `encode_fault`."""
    (length,) = _LENGTH.unpack_from(request)
    header = json.loads(request[_LENGTH.size : _LENGTH.size + length])
    if "fault" in header:
        raise error_of(*header["fault"])
    offset = _LENGTH.size + length
    data: list[Datum] = []
    for num_tokens, described in header["data"]:
        tokens, offset = _read(request, offset, "<i4", [num_tokens])
        inputs: dict[str, NDArray[Any]] = {}
        for name, dtype, shape in described:
            inputs[name], offset = _read(request, offset, dtype, shape)
        data.append(Datum(tokens, inputs))
    return TrainBatch(
        tuple(data),
        header["loss_fn"],
        header["config"],
        forward_only=header["forward_only"],
        custom_loss=header["custom_loss"],
    )


def _described(datum: Datum, arrays: list[NDArray[Any]]) -> list[Any]:
    """[number of tokens, [[name, number type, shape] of each input]]; the arrays are added."""
    arrays.append(datum.tokens.astype("<i4", copy=False))
    described: list[list[Any]] = []
    for name, values in datum.inputs.items():
        dtype = values.dtype.newbyteorder("<").str
        arrays.append(values.astype(dtype, copy=False))
        described.append([name, dtype, list(values.shape)])
    return [len(datum.tokens), described]


def _read(request: bytes, offset: int, dtype: str, shape: list[int]) -> tuple[NDArray[Any], int]:
    count = int(np.prod(shape, dtype=np.int64))
    array = np.frombuffer(request, dtype, count, offset).reshape(shape)
    return array, offset + array.nbytes
