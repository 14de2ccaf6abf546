"""What goes between the API process and the ranks. No torch: both sides import this."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tinkercloud.core.plan import Plan
from tinkercloud.core.types import TrainOutput


@dataclass(frozen=True, slots=True)
class RankSettings:
    """init_method: torch.distributed's, the same for all ranks. folder: the base model's Hugging
    Face folder, readable by all ranks. prepare: "module:function" giving RankHooks, None: CUDA.
    resident_adapters: adapters in device memory at one time, the rest wait on the host."""

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
class Packed:
    """A pickled argument: serialised once, however many ranks get it."""

    data: bytes


@dataclass(frozen=True, slots=True)
class RankOutput:
    """What one rank has to tell: outputs[i] belongs to datum indices[i]. metrics: of all datums."""

    indices: tuple[int, ...]
    outputs: tuple[Mapping[str, NDArray[np.float32]], ...]
    metrics: Mapping[str, float]


def merge_outputs(parts: Sequence[RankOutput | None]) -> TrainOutput:
    """The request's output, in its order, from what its ranks returned."""
    told = [part for part in parts if part is not None]
    outputs = {i: o for part in told for i, o in zip(part.indices, part.outputs, strict=True)}
    assert sorted(outputs) == list(range(len(outputs))), "every datum has exactly one output"
    return TrainOutput(tuple(outputs[i] for i in range(len(outputs))), dict(told[0].metrics))
