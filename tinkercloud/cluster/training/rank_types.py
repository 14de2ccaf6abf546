"""Types that pass between the API process and the ranks. No torch: both sides import this."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tinkercloud.core.types import Datum, TrainBatch, TrainOutput
from tinkercloud.planning.plan import Plan

Form = Literal["adapter", "merged"]
"""Of exported weights: a PEFT folder, or a Hugging Face folder with adapters merged in."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """init_method: torch.distributed's, the same for all ranks. folder: the base model's Hugging
    Face folder, readable by all ranks. prepare: "module:function" that returns RankHooks; None:
    CUDA. resident_adapters: adapters in device memory at a time; others are offloaded."""

    rank: int
    world_size: int
    init_method: str
    plan: Plan
    base_model: str
    folder: Path
    prepare: str | None = None
    timeout_s: float = 600.0
    resident_adapters: int = 4


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """A TrainBatch with the arrays of all datums concatenated, for Ray's object store: that makes a
    buffer of every array, and a batch has thousands. All datums have inputs of the same names.

    columns: by name; "": the tokens. shapes: by name, of each datum's array.
    """

    columns: Mapping[str, NDArray[Any]]
    shapes: Mapping[str, tuple[tuple[int, ...], ...]]
    loss_fn: str
    loss_fn_config: Mapping[str, float]
    forward_only: bool

    @classmethod
    def of(cls, batch: TrainBatch) -> "BatchColumns":
        arrays = {"": [datum.tokens for datum in batch.data]}
        for name in batch.data[0].inputs:
            arrays[name] = [datum.inputs[name] for datum in batch.data]
        return cls(
            {name: np.concatenate([a.ravel() for a in rows]) for name, rows in arrays.items()},
            {name: tuple(a.shape for a in rows) for name, rows in arrays.items()},
            *(batch.loss_fn, batch.loss_fn_config, batch.forward_only),
        )

    def batch(self) -> TrainBatch:
        """The TrainBatch; its arrays are views."""
        arrays = {name: _split(self.columns[name], self.shapes[name]) for name in self.columns}
        tokens = arrays.pop("")
        data = tuple(
            Datum(sequence, {name: column[i] for name, column in arrays.items()})
            for i, sequence in enumerate(tokens)
        )
        return TrainBatch(data, self.loss_fn, self.loss_fn_config, self.forward_only)


def _split(column: NDArray[Any], shapes: Sequence[tuple[int, ...]]) -> list[NDArray[Any]]:
    ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
    starts = [0, *ends[:-1]]
    return [column[a:b].reshape(s) for a, b, s in zip(starts, ends, shapes, strict=True)]


@dataclass(frozen=True, slots=True)
class RankOutput:
    """One rank's results: outputs[i] belongs to datum indices[i]. metrics: of all datums."""

    indices: tuple[int, ...]
    outputs: tuple[Mapping[str, NDArray[np.float32]], ...]
    metrics: Mapping[str, float]


def merge_outputs(parts: Sequence[RankOutput | None]) -> TrainOutput:
    """The request's output, in the order of its datums, from the results of its ranks."""
    reports = [part for part in parts if part is not None]
    outputs = {i: o for part in reports for i, o in zip(part.indices, part.outputs, strict=True)}
    assert sorted(outputs) == list(range(len(outputs))), "every datum has exactly one output"
    return TrainOutput(tuple(outputs[i] for i in range(len(outputs))), dict(reports[0].metrics))
