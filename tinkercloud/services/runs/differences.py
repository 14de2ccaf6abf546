"""Where two runs part: the first operation that is not the same in both."""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from tinkercloud.core.operation_codec import decode_batch
from tinkercloud.core.types import Datum, TrainBatch
from tinkercloud.fingerprints import tensors_sha256
from tinkercloud.services.recovery.lane_operations import (
    CREATE,
    FORWARD_BACKWARD,
    LOAD,
    OPTIM_STEP,
    PUBLISH,
    Loading,
)
from tinkercloud.services.runs.kept_runs import KeptRun, KeptRuns
from tinkercloud.storage.journal import STEP_KIND, RanOperation


@dataclass(frozen=True, slots=True)
class Difference:
    """of: the operation in each of the runs; None where a run has ended before. step: the one that
    the operations lead to, counted from 1."""

    of: tuple[RanOperation | None, RanOperation | None]
    step: int
    what: str


@dataclass(slots=True)
class Comparison:
    """num_equal: operations before the difference, if there is one. from_step: the first one that
    both runs keep whole."""

    from_step: int
    num_equal: int = 0
    difference: Difference | None = None


async def compare(runs: KeptRuns, a: KeptRun, b: KeptRun) -> Comparison:
    # The first step that is kept of a run that was cut may lack operations before its snapshot.
    start = max(0 if kept.beginning is None else kept.steps[0] for kept in (a, b))
    sides = [await _operations_after(runs, kept, start) for kept in (a, b)]
    comparison = Comparison(start + 1)
    step = start + 1
    while True:
        pair = [await anext(side, None) for side in sides]
        left, right = pair
        if left is None and right is None:
            return comparison
        what = _difference(runs, left, right)
        if what is not None:
            comparison.difference = Difference((left, right), step, what)
            return comparison
        comparison.num_equal += 1
        step += left is not None and left.kind == STEP_KIND


async def _operations_after(
    runs: KeptRuns, kept: KeptRun, step: int
) -> AsyncIterator[RanOperation]:
    after = 0 if step == 0 else await runs.position_of_step(kept, step)
    return runs.operations(kept, after, kept.run.last)


def _difference(
    runs: KeptRuns, left: RanOperation | None, right: RanOperation | None
) -> str | None:
    """In words; None: they are the same."""
    if left is None or right is None:
        return "the run has no such operation"
    if left.kind != right.kind:
        return f"{left.kind} and {right.kind}"
    if left.kind == FORWARD_BACKWARD:
        difference = _of_batches(decode_batch(left.request), decode_batch(right.request))
    elif left.kind == LOAD:
        hashes = [
            tensors_sha256(runs.files.loaded(each.model_id, each.request_id))
            for each in (left, right)
        ]
        difference = None if hashes[0] == hashes[1] else "other weights or moments were loaded"
    else:
        difference = _of_values("", _fields(left), _fields(right))
    if difference is not None:
        return difference
    if left.kind in (FORWARD_BACKWARD, OPTIM_STEP) and left.digest != right.digest:
        return "the same was asked, and the result is another"
    return None


def _fields(operation: RanOperation) -> dict[str, Any]:
    """What it asks for, without names of models and checkpoints, which every run has its own of."""
    if operation.kind == PUBLISH:
        return {}
    if operation.kind == LOAD:
        return {"optimizer": Loading.decoded(operation.request).body.optimizer}
    fields = json.loads(operation.request)
    assert operation.kind in (CREATE, OPTIM_STEP)
    return {name: v for name, v in fields.items() if name not in ("model_id", "seq_id")}


def _of_batches(left: TrainBatch, right: TrainBatch) -> str | None:
    for name in ("loss_fn", "loss_fn_config", "custom_loss"):
        difference = _of_values(name, getattr(left, name), getattr(right, name))
        if difference is not None:
            return difference
    if len(left.data) != len(right.data):
        return f"{len(left.data)} and {len(right.data)} datums"
    for index, (first, second) in enumerate(zip(left.data, right.data, strict=True)):
        difference = _of_data(first, second)
        if difference is not None:
            return f"datum {index}: {difference}"
    return None


def _of_data(left: Datum, right: Datum) -> str | None:
    difference = _of_arrays("tokens", left.tokens, right.tokens)
    for name in sorted({*left.inputs, *right.inputs}):
        if difference is None:
            difference = _of_arrays(name, left.inputs.get(name), right.inputs.get(name))
    return difference


def _of_arrays(name: str, left: Any, right: Any) -> str | None:
    if left is None or right is None:
        return f"{name} in one of them only"
    if left.shape != right.shape:
        return f"{name} of shape {list(left.shape)} and {list(right.shape)}"
    both_nan = np.isnan(left) & np.isnan(right)
    places = np.flatnonzero(~((left == right) | both_nan))
    if not len(places):
        return None
    first = int(places[0])
    return f"{name}[{first}] is {left.ravel()[first]} and {right.ravel()[first]}"


def _of_values(name: str, left: Any, right: Any) -> str | None:
    """Of what JSON has in requests: values, and mappings of names to them."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        mine, theirs = cast("Mapping[str, Any]", left), cast("Mapping[str, Any]", right)
        for key in sorted({*mine, *theirs}):
            inner = f"{name}.{key}" if name else key
            difference = _of_values(inner, mine.get(key), theirs.get(key))
            if difference is not None:
                return difference
        return None
    return None if left == right else f"{name} is {left} and {right}"
