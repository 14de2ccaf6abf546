"""Batches of training data as requests, and the answers to them."""

import dataclasses
from collections.abc import Sequence

import httpx

from tinker_gmi.connection.transport import decoder, is_protobuf
from tinker_gmi.conversions import (
    check_sparse_growth,
    forward_backward_output,
    split_for_requests,
    wire_datum,
)
from tinker_gmi.types import ClientConfigResponse, Datum, ForwardBackwardOutput
from tinkercloud.wire import codec

MAX_DATUMS_PER_REQUEST = 1024
MAX_BYTES_PER_REQUEST = 5_000_000


def batch_requests(
    whole: codec.ForwardBackwardRequest, data: Sequence[Datum], limits: ClientConfigResponse
) -> list[codec.ForwardBackwardRequest]:
    """`whole` with the data, cut at the server's limits. Raises ValueError for data that cannot be
    trained on."""
    if not data:
        raise ValueError("data is empty")
    check_sparse_growth(data)
    datums = [wire_datum(datum) for datum in data]
    for index, datum in enumerate(datums):
        if any(isinstance(chunk, codec.UnsupportedChunk) for chunk in datum.chunks):
            raise ValueError(f"datum {index}: only text can be trained on")
    chunks = split_for_requests(
        datums,
        limits.fwdbwd_max_chunk_len or MAX_DATUMS_PER_REQUEST,
        limits.fwdbwd_max_chunk_bytes_count or MAX_BYTES_PER_REQUEST,
    )
    return [dataclasses.replace(whole, data=tuple(chunk)) for chunk in chunks]


def decode_output(response: httpx.Response) -> ForwardBackwardOutput:
    if is_protobuf(response):
        return forward_backward_output(codec.decode_train_output(response.content))
    return decoder(ForwardBackwardOutput)(response)
