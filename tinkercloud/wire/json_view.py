"""Protobuf results as JSON text, for clients that only speak JSON. Not finite becomes null.

The text comes in short strings: the encoder of `json` holds the GIL for its whole run, and lists of
Python numbers take ten times the memory of their array. Axes: P positions, k pairs of each.
"""

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkercloud.core.types import SampledSequence, SampleOutput, Topk, TrainOutput

BLOCK = 1024  # numbers, or pairs of them, that are encoded at once

Text = Iterable[str]


def train_output_json(output: TrainOutput) -> Text:
    metrics = {name: _number(value) for name, value in output.metrics.items()}
    datums = (
        _object((name, _tensor(array)) for name, array in fields.items())
        for fields in output.outputs
    )
    return _object(
        [
            ("loss_fn_output_type", _value("ArrayRecord")),
            ("loss_fn_outputs", _array(datums)),
            ("metrics", _value(metrics)),
        ]
    )


def is_finite(output: TrainOutput) -> bool:
    """Whether no number of its `train_output_json` is null."""
    arrays = (array for fields in output.outputs for array in fields.values())
    numbers = all(math.isfinite(value) for value in output.metrics.values())
    return numbers and all(bool(np.isfinite(array).all()) for array in arrays)


def sample_output_json(output: SampleOutput) -> Text:
    fields: list[tuple[str, Text]] = [
        ("type", _value("sample")),
        ("sequences", _array(_sequence(sequence) for sequence in output.sequences)),
        ("prompt_cache_hit_tokens", _value(output.prompt_cache_hit_tokens)),
    ]
    if output.prompt_logprobs is not None:
        fields.append(("prompt_logprobs", _numbers(output.prompt_logprobs)))
    if output.topk_prompt_logprobs is not None:
        fields.append(("topk_prompt_logprobs", _topk(output.topk_prompt_logprobs)))
    if output.target_prompt_logprobs is not None:
        fields.append(("target_prompt_logprobs", _tensor(output.target_prompt_logprobs)))
    if output.prompt_alt_tokens is not None:
        alternatives = output.prompt_alt_tokens
        tensors = [
            ("tokens", _tensor(alternatives.tokens)),
            ("logprobs", _tensor(alternatives.logprobs)),
        ]
        fields.append(("prompt_alt_tokens", _object(tensors)))
    return _object(fields)


def _sequence(sequence: SampledSequence) -> Text:
    fields = [
        ("stop_reason", _value(sequence.stop_reason)),
        ("tokens", _numbers(sequence.tokens)),
        ("logprobs", _numbers(sequence.logprobs)),
    ]
    if sequence.topk is not None:
        fields.append(("topk_logprobs", _topk(sequence.topk)))
    return _object(fields)


def _topk(topk: Topk) -> Text:
    """A row of [token id, log-probability] pairs for each position; null where not scored."""
    return _array(
        _pairs(ids, logprobs) for ids, logprobs in zip(topk.token_ids, topk.logprobs, strict=True)
    )


def _pairs(ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> Text:
    scored = logprobs > -99999.0
    ids, logprobs = ids[scored], logprobs[scored]
    if not len(ids):
        return _value(None)
    pairs = (
        [list(pair) for pair in zip(ids[span].tolist(), logprobs[span].tolist(), strict=True)]
        for span in _spans(len(ids))
    )
    return _array(map(_run, pairs))


def _tensor(array: NDArray[Any]) -> Text:
    dtype = "float32" if array.dtype.kind == "f" else "int64"
    fields = [
        ("data", _numbers(array.reshape(-1))),
        ("dtype", _value(dtype)),
        ("shape", _value(list(array.shape))),
    ]
    return _object(fields)


def _numbers(array: NDArray[Any]) -> Text:
    blocks = (array[span].tolist() for span in _spans(len(array)))
    return _array(_run([_number(value) for value in block]) for block in blocks)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _spans(length: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK) for start in range(0, length, BLOCK))


def _run(items: list[Any]) -> Text:
    """Several items of an array at once."""
    return [json.dumps(items)[1:-1]]


def _value(value: object) -> Text:
    return [json.dumps(value, allow_nan=False)]


def _array(items: Iterable[Text]) -> Iterator[str]:
    separator = "["
    for item in items:
        yield separator
        yield from item
        separator = ", "
    yield "[]" if separator == "[" else "]"


def _object(fields: Iterable[tuple[str, Text]]) -> Iterator[str]:
    separator = "{"
    for name, value in fields:
        yield f"{separator}{json.dumps(name)}: "
        yield from value
        separator = ", "
    yield "{}" if separator == "{" else "}"
