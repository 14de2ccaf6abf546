"""Protobuf results as JSON objects, for clients that only speak JSON. Not finite becomes null."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkercloud.core.types import SampledSequence, Topk
from tinkercloud.wire.codec import decode_sample_output, decode_train_output


def train_output_json(body: bytes) -> dict[str, Any]:
    output = decode_train_output(body)
    return {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {name: _tensor(array) for name, array in fields.items()} for fields in output.outputs
        ],
        "metrics": {name: _number(value) for name, value in output.metrics.items()},
    }


def is_finite_train_view(view: dict[str, Any]) -> bool:
    """Whether every number of a `train_output_json` is there, none of them null."""
    tensors = [tensor for fields in view["loss_fn_outputs"] for tensor in fields.values()]
    return None not in view["metrics"].values() and all(None not in t["data"] for t in tensors)


def sample_output_json(body: bytes) -> dict[str, Any]:
    output = decode_sample_output(body)
    view: dict[str, Any] = {
        "type": "sample",
        "sequences": [_sequence(sequence) for sequence in output.sequences],
        "prompt_cache_hit_tokens": output.prompt_cache_hit_tokens,
    }
    if output.prompt_logprobs is not None:
        view["prompt_logprobs"] = _numbers(output.prompt_logprobs)
    if output.topk_prompt_logprobs is not None:
        view["topk_prompt_logprobs"] = _topk(output.topk_prompt_logprobs)
    if output.target_prompt_logprobs is not None:
        view["target_prompt_logprobs"] = _tensor(output.target_prompt_logprobs)
    if output.prompt_alt_tokens is not None:
        alternatives = output.prompt_alt_tokens
        view["prompt_alt_tokens"] = {
            "tokens": _tensor(alternatives.tokens),
            "logprobs": _tensor(alternatives.logprobs),
        }
    return view


def _sequence(sequence: SampledSequence) -> dict[str, Any]:
    view: dict[str, Any] = {
        "stop_reason": sequence.stop_reason,
        "tokens": sequence.tokens.tolist(),
        "logprobs": _numbers(sequence.logprobs),
    }
    if sequence.topk is not None:
        view["topk_logprobs"] = _topk(sequence.topk)
    return view


def _topk(topk: Topk) -> list[list[list[float]] | None]:
    """A row of [token id, log-probability] pairs for each position; null where not scored."""
    rows: list[list[list[float]] | None] = []
    for ids, values in zip(topk.token_ids.tolist(), topk.logprobs.tolist(), strict=True):
        pairs = [[i, v] for i, v in zip(ids, values, strict=True) if v > -99999.0]
        rows.append(pairs or None)
    return rows


def _tensor(array: NDArray[Any]) -> dict[str, Any]:
    dtype = "float32" if array.dtype.kind == "f" else "int64"
    return {"data": _numbers(array.reshape(-1)), "dtype": dtype, "shape": list(array.shape)}


def _numbers(array: NDArray[Any]) -> list[float | None]:
    if array.dtype.kind != "f" or bool(np.isfinite(array).all()):
        return array.tolist()
    return [_number(value) for value in array.tolist()]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
