"""The protobuf side of the API: forward_backward requests, training and sampling results.

Both directions, for server and client (wire specification, section 6). Decoding raises WireError
and nothing else, whatever the bytes. Axes: N tokens of a datum, K alternative targets.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from tinkercloud.core.types import (
    PromptAltTokens,
    ProvenanceSpan,
    SampledSequence,
    SampleOutput,
    Topk,
    TrainOutput,
)
from tinkercloud.wire import tinker_pb2 as pb
from tinkercloud.wire.arrays import (
    WireError,
    check_csr,
    densify_csr,
    from_bytes,
    item_type,
    num_elements,
    plain_from_bytes,
    reshaped,
    stored,
    tensor_from_message,
    write_tensor,
)
from tinkercloud.wire.spans import decode_spans, num_spans, write_spans

__all__ = [
    "MAX_DATUMS",
    "ForwardBackwardRequest",
    "UnsupportedChunk",
    "WireDatum",
    "WireError",
    "check_csr",
    "check_growth",
    "decode_forward_backward_request",
    "decode_sample_output",
    "decode_train_output",
    "densify_csr",
    "encode_forward_backward_request",
    "encode_sample_output",
    "encode_train_output",
    "reshaped",
]

MAX_DATUMS = 65536
MAX_PARTS = 2**20  # chunks and tensors of one request
# Sparse tensors grow when densified; together they may grow to this many elements per byte sent,
# beyond a free allowance that makes small requests simple.
SPARSE_FREE_ELEMENTS = 2**24
SPARSE_ELEMENTS_PER_BYTE = 32

_INT32 = np.dtype("<i4")
_INT64 = np.dtype("<i8")
_FLOAT32 = np.dtype("<f4")

MessageT = TypeVar("MessageT", bound=Message)


@dataclass(frozen=True, slots=True)
class UnsupportedChunk:
    """A chunk that is not text. kind: "image", "dmel", or "empty"."""

    kind: str


@dataclass(frozen=True, slots=True)
class WireDatum:
    """chunks: int32 token arrays in order. inputs: dense float32 or int64, any shape. The spans
    say where the tokens of the model input, and of target_tokens, were sampled; nothing is checked
    of them yet."""

    chunks: tuple[NDArray[np.int32] | UnsupportedChunk, ...]
    inputs: Mapping[str, NDArray[Any]]
    model_input_spans: tuple[ProvenanceSpan, ...] = ()
    loss_fn_input_spans: tuple[ProvenanceSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class ForwardBackwardRequest:
    """A forward_backward body; seq_id 0 means that the sender left it out."""

    model_id: str
    seq_id: int
    data: tuple[WireDatum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


def decode_forward_backward_request(body: bytes) -> ForwardBackwardRequest:
    """Raises WireError on anything that is not a well-formed request."""
    message = _parse(pb.ForwardBackwardRequest, body)
    _check_size(message.data, len(body))
    return ForwardBackwardRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=tuple(_decode_datum(index, datum) for index, datum in enumerate(message.data)),
        loss_fn=message.loss_fn,
        loss_fn_config=_decode_loss_config(message),
        forward_only=message.forward_only,
    )


def encode_forward_backward_request(request: ForwardBackwardRequest) -> bytes:
    """Raises WireError for chunks that are not text and values out of the wire's range."""
    try:
        message = pb.ForwardBackwardRequest(
            model_id=request.model_id,
            seq_id=request.seq_id,
            loss_fn=request.loss_fn,
            forward_only=request.forward_only,
        )
    except ValueError as error:
        raise WireError(str(error)) from error
    for name, value in request.loss_fn_config.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[name].text = value
        else:  # twice: older servers read the first form only (wire specification, section 6.1)
            message.loss_fn_config[name] = value
            message.loss_fn_config_v2[name].number = value
    for datum in request.data:
        _write_datum(message.data.add(), datum)
    return message.SerializeToString(deterministic=True)


def encode_train_output(output: TrainOutput) -> bytes:
    """A ForwardBackwardOutput: one record per run of datums with equal trailing shapes, the only
    way to send ragged ones (wire specification, section 6.3)."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in output.metrics.items():
        message.metrics[name] = value
    for run in _equal_runs(output.outputs):
        record = message.loss_fn_outputs.add(num_datums=len(run))
        for name in run[0]:
            _write_batch(record.fields[name], [np.atleast_1d(datum[name]) for datum in run])
    return message.SerializeToString(deterministic=True)


def decode_train_output(body: bytes) -> TrainOutput:
    """Outputs in the order of the request's datums; int32 widened to int64, bfloat16 to float32."""
    message = _parse(pb.ForwardBackwardOutput, body)
    outputs: list[Mapping[str, NDArray[Any]]] = []
    for record in message.loss_fn_outputs:
        outputs.extend(_decode_record(record))
        if len(outputs) > MAX_PARTS:
            raise WireError(f"a result of more than {MAX_PARTS} datums")
    return TrainOutput(outputs=tuple(outputs), metrics=dict(message.metrics))


def encode_sample_output(output: SampleOutput) -> bytes:
    """A SampleResponse; absent parts stay absent."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=output.prompt_cache_hit_tokens)
    for sequence in output.sequences:
        length = sequence.stop_reason == "length"
        part = message.sequences.add(
            stop_reason=pb.STOP_REASON_LENGTH if length else pb.STOP_REASON_STOP,
            tokens=_bytes(sequence.tokens, _INT32),
            logprobs=_bytes(sequence.logprobs, _FLOAT32),
        )
        if sequence.topk is not None:
            _write_topk(part.topk_sampled_logprobs, sequence.topk)
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = _bytes(output.prompt_logprobs, _FLOAT32)
    if output.topk_prompt_logprobs is not None:
        _write_topk(message.topk_prompt_logprobs, output.topk_prompt_logprobs)
    if output.target_prompt_logprobs is not None:
        write_tensor(message.target_prompt_logprobs, output.target_prompt_logprobs)
    if output.prompt_alt_tokens is not None:
        write_tensor(message.prompt_alt_tokens.tokens, output.prompt_alt_tokens.tokens)
        write_tensor(message.prompt_alt_tokens.logprobs, output.prompt_alt_tokens.logprobs)
    return message.SerializeToString(deterministic=True)


def decode_sample_output(body: bytes) -> SampleOutput:
    """Raises WireError where arrays that belong together differ in length."""
    message = _parse(pb.SampleResponse, body)
    if len(message.sequences) > MAX_PARTS:
        raise WireError(f"a result of more than {MAX_PARTS} sequences")
    prompt = message.prompt_logprobs if message.HasField("prompt_logprobs") else None
    target = message.HasField("target_prompt_logprobs")
    topk = message.HasField("topk_prompt_logprobs")
    return SampleOutput(
        sequences=tuple(_decode_sequence(sequence) for sequence in message.sequences),
        prompt_logprobs=None if prompt is None else _numbers(prompt, _FLOAT32, np.float32),
        topk_prompt_logprobs=_decode_topk(message.topk_prompt_logprobs) if topk else None,
        target_prompt_logprobs=(
            tensor_from_message(message.target_prompt_logprobs) if target else None
        ),
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
        prompt_alt_tokens=(
            PromptAltTokens(
                tensor_from_message(message.prompt_alt_tokens.tokens),
                tensor_from_message(message.prompt_alt_tokens.logprobs),
            )
            if message.HasField("prompt_alt_tokens")
            else None
        ),
    )


def _parse(kind: type[MessageT], body: bytes) -> MessageT:
    message = kind()
    try:
        message.ParseFromString(body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"the body is no {kind.__name__} message: {error}") from error
    return message


def check_growth(sparse_elements: Iterable[int], body_bytes: int) -> None:
    """Raises WireError where the sparse tensors of one request, made dense, would together exceed
    what a request of `body_bytes` may take."""
    budget = SPARSE_FREE_ELEMENTS + SPARSE_ELEMENTS_PER_BYTE * body_bytes
    if sum(sparse_elements) > budget:
        raise WireError(
            "the sparse tensors of this request are too large when made dense; "
            "send fewer datums per request"
        )


def _check_size(data: Any, body_bytes: int) -> None:
    if len(data) > MAX_DATUMS:
        raise WireError(f"{len(data)} datums in one request; at most {MAX_DATUMS} are allowed")
    parts = sum(len(d.model_input) + len(d.loss_fn_inputs) + num_spans(d) for d in data)
    if parts > MAX_PARTS:
        raise WireError(f"{parts} chunks, tensors and spans in one request; at most {MAX_PARTS}")
    sparse_elements = (
        _located(index, name, num_elements, tuple(tensor.shape))
        for index, datum in enumerate(data)
        for name, tensor in datum.loss_fn_inputs.items()
        if tensor.WhichOneof("encoding") == "sparse_csr"
    )
    check_growth(sparse_elements, body_bytes)


def _located(index: int, name: str, work: Any, argument: Any) -> Any:
    try:
        return work(argument)
    except WireError as error:
        raise WireError(f"datum {index}, input {name!r}: {error}") from error


def _decode_datum(index: int, message: "pb.Datum") -> WireDatum:
    return WireDatum(
        chunks=tuple(_located(index, "tokens", _decode_chunk, c) for c in message.model_input),
        inputs={
            name: _located(index, name, tensor_from_message, tensor)
            for name, tensor in message.loss_fn_inputs.items()
        },
        model_input_spans=_located(
            index, "model_input_spans", decode_spans, message.model_input_spans
        ),
        loss_fn_input_spans=_located(
            index, "loss_fn_input_spans", decode_spans, message.loss_fn_input_spans
        ),
    )


def _decode_chunk(message: "pb.Chunk") -> NDArray[np.int32] | UnsupportedChunk:
    kind = message.WhichOneof("chunk")
    if kind == "encoded_text":
        return _numbers(message.encoded_text.tokens, _INT32, np.int32)
    return UnsupportedChunk(kind or "empty")


def _decode_loss_config(message: "pb.ForwardBackwardRequest") -> dict[str, float | str]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    config: dict[str, float | str] = {}
    for name, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise WireError(f"loss_fn_config {name!r} has neither a number nor a text")
        config[name] = value.text if kind == "text" else value.number
    return config


def _write_datum(message: "pb.Datum", datum: WireDatum) -> None:
    for chunk in datum.chunks:
        if isinstance(chunk, UnsupportedChunk):
            raise WireError(f"a chunk of kind {chunk.kind!r} cannot be sent; only text can")
        message.model_input.add().encoded_text.tokens = _bytes(chunk, _INT32)
    for name, array in datum.inputs.items():
        write_tensor(message.loss_fn_inputs[name], np.asarray(array))
    write_spans(message.model_input_spans, datum.model_input_spans)
    write_spans(message.loss_fn_input_spans, datum.loss_fn_input_spans)


def _equal_runs(outputs: Iterable[Mapping[str, NDArray[Any]]]) -> list[list[Mapping[str, NDArray]]]:
    """Split into runs whose trailing shapes and dtypes agree; order is kept."""
    runs: list[list[Mapping[str, NDArray[Any]]]] = []
    previous: dict[str, Any] | None = None
    for datum in outputs:
        layout = {n: (np.shape(a)[1:], np.asarray(a).dtype.kind) for n, a in datum.items()}
        if previous is not None and layout.keys() != previous.keys():
            raise WireError("every datum of a result must have the same fields")
        if layout == previous:
            runs[-1].append(datum)
        else:
            runs.append([datum])
        previous = layout
    return runs


def _write_batch(message: "pb.BatchedTensor", arrays: list[NDArray]) -> None:
    data, message.dtype = stored(np.concatenate([array.reshape(-1) for array in arrays]))
    sizes = [array.size * data.itemsize for array in arrays]
    message.data = data.tobytes()
    message.offsets = _bytes(np.cumsum([0, *sizes]), _INT64)
    message.trailing_shape.extend(arrays[0].shape[1:])


def _decode_record(record: "pb.ArrayRecord") -> list[Mapping[str, NDArray[Any]]]:
    fields = {name: _decode_batch(name, batch) for name, batch in record.fields.items()}
    counts = {len(arrays) for arrays in fields.values()}
    # num_datums 0 with fields: a sender from before num_datums existed.
    num_datums = record.num_datums or next(iter(counts), 0)
    if counts - {num_datums} or not 0 <= num_datums <= MAX_PARTS:
        raise WireError(f"a record of {num_datums} datums has fields of {sorted(counts)} datums")
    return [{name: arrays[i] for name, arrays in fields.items()} for i in range(num_datums)]


def _decode_batch(name: str, message: "pb.BatchedTensor") -> list[NDArray]:
    offsets = plain_from_bytes(message.offsets, _INT64)
    trailing = tuple(message.trailing_shape)
    row_bytes = item_type(message.dtype).itemsize * num_elements(trailing)
    flat = from_bytes(message.data, message.dtype)
    in_order = (
        0 < len(offsets) <= MAX_PARTS
        and offsets[0] == 0
        and offsets[-1] == len(message.data)
        and not bool(np.any((offsets[1:] < offsets[:-1]) | (offsets[1:] < 0)))
    )
    if not in_order:
        raise WireError(f"the offsets of field {name!r} do not rise from 0 to the data's end")
    if row_bytes == 0 and flat.size:
        raise WireError(f"field {name!r} has data but rows of shape {list(trailing)}")
    if row_bytes == 0:
        return [flat.reshape(0, *trailing) for _ in offsets[1:]]
    if bool(np.any(offsets % row_bytes)):
        raise WireError(f"field {name!r} is cut inside a row of shape {list(trailing)}")
    rows = reshaped(flat, (len(message.data) // row_bytes, *trailing))
    return np.split(rows, offsets[1:-1] // row_bytes) if len(offsets) > 1 else []


def _decode_sequence(message: "pb.SampledSequence") -> SampledSequence:
    tokens = _numbers(message.tokens, _INT32, np.int32)
    logprobs = _numbers(message.logprobs, _FLOAT32, np.float32)
    if message.stop_reason not in (pb.STOP_REASON_STOP, pb.STOP_REASON_LENGTH):
        raise WireError(f"stop_reason {message.stop_reason} is neither stop (0) nor length (1)")
    if len(logprobs) != len(tokens):
        raise WireError(f"{len(tokens)} sampled tokens but {len(logprobs)} logprobs")
    topk = message.HasField("topk_sampled_logprobs")
    return SampledSequence(
        tokens=tokens,
        logprobs=logprobs,
        stop_reason="length" if message.stop_reason == pb.STOP_REASON_LENGTH else "stop",
        topk=_decode_topk(message.topk_sampled_logprobs) if topk else None,
    )


def _write_topk(message: "pb.TopkLogprobs", topk: Topk) -> None:
    message.length, message.k = topk.token_ids.shape
    message.token_ids = _bytes(topk.token_ids, _INT32)
    message.logprobs = _bytes(topk.logprobs, _FLOAT32)
    message.SetInParent()


def _decode_topk(message: "pb.TopkLogprobs") -> Topk:
    shape = (message.length, message.k)
    return Topk(
        token_ids=reshaped(_numbers(message.token_ids, _INT32, np.int32), shape),
        logprobs=reshaped(_numbers(message.logprobs, _FLOAT32, np.float32), shape),
    )


def _bytes(array: NDArray, dtype: np.dtype) -> bytes:
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def _numbers(data: bytes, stored_as: np.dtype, number: type[np.generic]) -> NDArray[Any]:
    return plain_from_bytes(data, stored_as).astype(number)
