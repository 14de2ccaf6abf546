"""The data of a custom loss: the inputs that it declares, of the ranks that it declares."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkercloud.core.data_converter import DataConverter
from tinkercloud.core.raw_batch import RawBatch, WireDatum
from tinkercloud.core.types import Datum, TrainBatch, TrainOutput
from tinkercloud.errors import InvalidRequest
from tinkercloud.losses.custom.graph import CustomLoss, parse

PREFIX = "custom/"  # of metrics
MAX_ELEMENTS = 2**22  # of one input


def custom_batch(converter: DataConverter, raw: RawBatch, text: str) -> TrainBatch:
    """text: the loss as JSON. Raises InvalidRequest."""
    if not raw.data:
        raise InvalidRequest("data is empty; send at least one datum")
    loss = parse(text)
    data = tuple(
        _datum(converter, f"datum {index}", datum, loss) for index, datum in enumerate(raw.data)
    )
    return TrainBatch(data, raw.loss_fn, {}, raw.forward_only, text)


def _datum(converter: DataConverter, where: str, datum: WireDatum, loss: CustomLoss) -> Datum:
    tokens, targets = converter.tokens_and_targets(where, datum)
    (_, rank), *declared = loss.inputs
    if targets.ndim != rank:
        raise InvalidRequest(
            f"{where}, input 'target_tokens' has rank {targets.ndim}; {loss.name} declares "
            f"logprobs of rank {rank}"
        )
    # Others are left out, as the client's own path does: scripts share data between losses.
    inputs: dict[str, NDArray[Any]] = {"target_tokens": targets}
    for name, rank in declared:
        inputs[name] = _input(f"{where}, input {name!r}", datum.inputs.get(name), rank)
    return Datum(tokens, inputs)


def _input(where: str, array: NDArray[Any] | None, rank: int) -> NDArray[Any]:
    """float32 or int64, as it was sent."""
    if array is None:
        raise InvalidRequest(f"{where} is missing; the custom loss takes it")
    if array.size > MAX_ELEMENTS:
        raise InvalidRequest(f"{where} has {array.size} elements; at most {MAX_ELEMENTS}")
    fits = array.size == 1 if rank == 0 else array.ndim == rank
    if not fits:
        raise InvalidRequest(f"{where} has shape {array.shape}; it was declared of rank {rank}")
    integers = array.dtype.kind in "iu"
    return np.ascontiguousarray(array, dtype=np.int64 if integers else np.float32)


def with_custom_metrics(output: TrainOutput) -> TrainOutput:
    """The metrics of each datum, summed or averaged over all as their names say."""
    sums: dict[str, float] = {}
    outputs: list[dict[str, NDArray[np.float32]]] = []
    for fields in output.outputs:
        outputs.append({name: a for name, a in fields.items() if not name.startswith(PREFIX)})
        for name, array in fields.items():
            if name.startswith(PREFIX):
                sums[name] = sums.get(name, 0.0) + float(array[0])
    num = len(output.outputs)
    metrics = {n: total / num if n.endswith(":mean") else total for n, total in sums.items()}
    return TrainOutput(tuple(outputs), {**output.metrics, **metrics})
