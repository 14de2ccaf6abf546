"""What training operations give their clients and take from them, the first time and when they are
done again."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np
from pydantic import ValidationError

from tinker_gmi.types import AdamParams as JsonAdamParams
from tinker_gmi.types import OptimStepRequest
from tinkercloud.core.custom_batch import with_custom_metrics
from tinkercloud.core.policy_metrics import policy_metrics
from tinkercloud.core.types import AdamParams, TrainBatch, TrainOutput
from tinkercloud.errors import InvalidRequest
from tinkercloud.losses.custom.graph import CUSTOM
from tinkercloud.wire.codec import decode_train_output, encode_train_output

FLOAT32_MAX = float(np.finfo(np.float32).max)
INLINE_DATUMS = 64  # results of more are encoded off the event loop


def computed_by_step(metrics: Mapping[str, float]) -> bytes:
    """JSON, with values that clients are not sent: those that are not finite."""
    return json.dumps(dict(metrics), sort_keys=True).encode()


def deviation(first: bytes, second: bytes) -> float:
    """The largest difference of a log-probability between what two passes of the same data
    computed, in nats."""
    pairs = zip(
        decode_train_output(first).outputs, decode_train_output(second).outputs, strict=True
    )
    differences = [np.abs(a["logprobs"] - b["logprobs"]).max(initial=0.0) for a, b in pairs]
    return float(max(differences, default=0.0))


async def computed_by_pass(batch: TrainBatch, output: TrainOutput) -> bytes:
    """As on the wire: TrainOutput as protobuf."""
    if len(batch.data) <= INLINE_DATUMS:
        return _encoded(batch, output)
    return await asyncio.to_thread(_encoded, batch, output)


def _encoded(batch: TrainBatch, output: TrainOutput) -> bytes:
    """With the metrics of RL: here, from what every backend returns, they are the same on all."""
    if batch.loss_fn == CUSTOM:
        return encode_train_output(with_custom_metrics(output))
    pairs = zip(output.outputs, batch.data, strict=True)
    data = ((fields["logprobs"], datum.inputs) for fields, datum in pairs)
    metrics = policy_metrics(batch.loss_fn, batch.loss_fn_config, data)
    return encode_train_output(TrainOutput(output.outputs, {**output.metrics, **metrics}))


def with_all_params(body: OptimStepRequest) -> OptimStepRequest:
    """The same step, whatever is the default of what its client left out when it is done again.
    What is to be refused in its turn stays as it is."""
    try:
        params = JsonAdamParams(**asdict(adam_params(body)))
    except InvalidRequest:
        return body
    return body.model_copy(update={"adam_params": params, "optimizer_params": None})


def adam_params(body: OptimStepRequest) -> AdamParams:
    """`optimizer_params` replaces `adam_params` (wire specification, section 8). Raises
    InvalidRequest."""
    wire_params = body.adam_params or JsonAdamParams()
    if body.optimizer_params is not None:
        family = body.optimizer_params.get("type", "adamw")
        if family == "dimuon":
            raise InvalidRequest(
                "optimizer_params of 'dimuon': its definition is not published, and this model was "
                "made with adamw; step with AdamParams"
            )
        if family not in ("adam", "adamw"):
            raise InvalidRequest(f"optimizer {family!r} in optimizer_params: this model has adamw")
        try:
            wire_params = JsonAdamParams.model_validate(body.optimizer_params)
        except ValidationError as error:
            raise InvalidRequest(f"optimizer_params: {error.errors()[0]['msg']}") from None
    params = AdamParams(**wire_params.model_dump())
    for name, value in asdict(params).items():
        highest = 1.0 if name in ("beta1", "beta2") else FLOAT32_MAX
        if not 0 <= value < highest:
            raise InvalidRequest(f"adam_params.{name} is {value}; it must lie in [0, {highest})")
    return params
