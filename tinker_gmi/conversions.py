"""Conversions between the API's types and the arrays of the wire codec, for client and server."""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tinker_gmi.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ModelInputChunk,
    PromptAltTokens,
    ProvenanceSpans,
    SampledSequence,
    SampleResponse,
    TensorData,
    TopkRow,
)
from tinkercloud.core.types import ProvenanceSpan, SampleOutput, Topk, TrainOutput
from tinkercloud.wire import codec

UNSCORED_LOGPROB = -99999.0
"""With token 0: an empty entry of a top-k table (specification 9.2)."""


def check_sparse_growth(data: Sequence[Datum]) -> None:
    """Raises WireError where sparse tensors would take too much memory as dense ones."""
    tensors = [tensor for datum in data for tensor in datum.loss_fn_inputs.values()]
    sparse = [math.prod(tensor.shape or ()) for tensor in tensors if tensor.is_sparse]
    codec.check_growth(sparse, sum(tensor.values.nbytes for tensor in tensors))


def wire_datum(datum: Datum) -> codec.WireDatum:
    """Raises WireError for token ids beyond 32 bits."""
    return codec.WireDatum(
        chunks=tuple(_wire_chunk(chunk) for chunk in datum.model_input.chunks),
        inputs={name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()},
        model_input_spans=_wire_spans(datum.model_input_spans),
        loss_fn_input_spans=_wire_spans(datum.loss_fn_input_spans),
    )


def _wire_spans(spans: ProvenanceSpans | None) -> tuple[ProvenanceSpan, ...]:
    return tuple(
        ProvenanceSpan(span.type, span.sequence_id, span.offset, span.length)
        for span in spans or ()
    )


def _wire_chunk(chunk: ModelInputChunk) -> NDArray[np.int32] | codec.UnsupportedChunk:
    if not isinstance(chunk, EncodedTextChunk):
        return codec.UnsupportedChunk(chunk.type)
    try:
        return np.asarray(chunk.tokens, dtype=np.int32)
    except OverflowError as error:
        raise codec.WireError("a token id is beyond 32 bits") from error


def split_for_requests(
    data: Sequence[codec.WireDatum], max_datums: int, max_bytes: int
) -> Iterator[list[codec.WireDatum]]:
    """Consecutive datums in order, at most `max_datums` and `max_bytes` to a request; a datum
    larger than that has a request to itself."""
    chunk: list[codec.WireDatum] = []
    chunk_bytes = 0
    for datum in data:
        num_bytes = _num_bytes(datum)
        if chunk and (len(chunk) >= max_datums or chunk_bytes + num_bytes > max_bytes):
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append(datum)
        chunk_bytes += num_bytes
    if chunk:
        yield chunk


def _num_bytes(datum: codec.WireDatum) -> int:
    tokens = [chunk for chunk in datum.chunks if not isinstance(chunk, codec.UnsupportedChunk)]
    return sum(array.nbytes for array in [*tokens, *datum.inputs.values()])


def forward_backward_output(output: TrainOutput) -> ForwardBackwardOutput:
    return ForwardBackwardOutput(
        loss_fn_outputs=[
            {name: TensorData.from_numpy(np.asarray(array)) for name, array in datum.items()}
            for datum in output.outputs
        ],
        metrics=dict(output.metrics),
    )


def sample_response(output: SampleOutput, sequence_ids: Sequence[str] = ()) -> SampleResponse:
    """sequence_ids: from the acknowledgement, in the order of the sequences; empty: unknown."""
    ids = sequence_ids or [""] * len(output.sequences)
    sequences = [
        SampledSequence(
            stop_reason=sequence.stop_reason,
            tokens=sequence.tokens.tolist(),
            logprobs=sequence.logprobs.tolist(),
            topk_logprobs=_topk_rows(sequence.topk),
            sequence_id=sequence_id,
        )
        for sequence, sequence_id in zip(output.sequences, ids, strict=True)
    ]
    target, alternatives = output.target_prompt_logprobs, output.prompt_alt_tokens
    return SampleResponse(
        sequences=sequences,
        prompt_logprobs=_none_for_nan(output.prompt_logprobs),
        topk_prompt_logprobs=_topk_rows(output.topk_prompt_logprobs),
        target_prompt_logprobs=None if target is None else TensorData.from_numpy(target),
        prompt_cache_hit_tokens=output.prompt_cache_hit_tokens,
        prompt_alt_tokens=alternatives
        and PromptAltTokens(
            tokens=TensorData.from_numpy(alternatives.tokens),
            logprobs=TensorData.from_numpy(alternatives.logprobs),
        ),
    )


def _none_for_nan(logprobs: NDArray[np.float32] | None) -> list[float | None] | None:
    if logprobs is None:
        return None
    numbers: list[float | None] = logprobs.tolist()
    for position in np.flatnonzero(np.isnan(logprobs)):
        numbers[position] = None
    return numbers


def _topk_rows(topk: Topk | None) -> list[TopkRow | None] | None:
    if topk is None:
        return None
    scored = (topk.token_ids != 0) | (topk.logprobs != np.float32(UNSCORED_LOGPROB))
    return [
        list(zip(ids[keep].tolist(), logprobs[keep].tolist(), strict=True)) or None
        for ids, logprobs, keep in zip(topk.token_ids, topk.logprobs, scored, strict=True)
    ]


def merge_outputs(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Concatenate the outputs of the chunks of a call; metrics are reduced as the part of their
    name after the colon says (specification 6.3)."""
    metrics: dict[str, float] = {}
    for name in outputs[0].metrics:
        if all(name in output.metrics for output in outputs):
            metrics.update(_reduce_metric(name, outputs))
    return ForwardBackwardOutput(
        loss_fn_output_type=outputs[0].loss_fn_output_type,
        loss_fn_outputs=[datum for output in outputs for datum in output.loss_fn_outputs],
        metrics=metrics,
    )


def _reduce_metric(name: str, outputs: Sequence[ForwardBackwardOutput]) -> Mapping[str, float]:
    values = [output.metrics[name] for output in outputs]
    weights = [len(output.loss_fn_outputs) for output in outputs]
    match name.rpartition(":")[2]:
        case "sum":
            return {name: math.fsum(values) if np.all(np.isfinite(values)) else sum(values)}
        case "min":
            return {name: min(values)}
        case "max":
            return {name: max(values)}
        case "mean":
            return {name: _weighted_mean(values, weights)}
        case "slack":
            return {name: max(values) - _weighted_mean(values, weights)}
        case "hash2":
            return {name: sum(int(value) % 2**64 for value in values) % 2**64}
        case "unique":
            return {name: values[0]} | {f"{name}_{i}": v for i, v in enumerate(values) if i > 0}
        case _:
            return {}


def _weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Weighted by datums; plain where no chunk has any."""
    if sum(weights) == 0:
        return sum(values) / len(values)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
