"""Admission by memory: what a request will take is estimated and compared with what is free, before
anything is allocated. Owned by the worker thread."""

from collections.abc import Callable

from tinkercloud.core import types
from tinkercloud.core.types import FLOAT32_BYTES, LoraSpec
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.training.micro_batches import MicroBatch
from tinkercloud.embedded.training.trainable_model import TrainableModel
from tinkercloud.errors import MemoryShort
from tinkercloud.weights.adapters import adapter_sizes

RESERVE_BYTES = 256 * 1024**2
"""Stays free: for what is too small, or too short, to be estimated."""


class MemoryBudget:
    """free_bytes: what can be taken now; None: it is not known, and everything is accepted."""

    def __init__(self, free_bytes: Callable[[], int | None] = lambda: None):
        self._free_bytes = free_bytes

    def require(self, what: str, needed: int, promised: int = 0) -> None:
        """promised: what was accepted earlier and is not allocated yet. Raises MemoryShort."""
        left = self._left(promised)
        if left is not None and needed > left:
            raise MemoryShort(what, needed, left)

    def has_room(self, needed: int, promised: int) -> bool:
        left = self._left(promised)
        return left is None or needed <= left

    def _left(self, promised: int) -> int | None:
        free = self._free_bytes()
        return None if free is None else max(0, free - promised - RESERVE_BYTES)


def num_trained(spec: LoraSpec, base: BaseModel) -> int:
    sizes = adapter_sizes(base.config.linear_shapes())
    return types.num_trained(spec, base.config.num_parameters, sizes)


def model_bytes(spec: LoraSpec, base: BaseModel) -> int:
    """Of a model in training: what counts for its owner's quota too."""
    return types.training_bytes(spec, num_trained(spec, base), base.dtype.itemsize)


def version_bytes(spec: LoraSpec, base: BaseModel) -> int:
    """Of what is published from a model: an adapter, or full weights in the base's type."""
    return num_trained(spec, base) * (FLOAT32_BYTES if spec.rank else base.dtype.itemsize)


def promised_bytes(model: TrainableModel) -> int:
    """Of a model's tensors those that its next pass and step allocate, or write for the first time
    (until then the system has not given their zeros a page)."""
    num = sum(param.numel() for param in model.params.values())
    copies = (not model.grads) + 2 * (model.optimizer.num_steps == 0)
    return num * FLOAT32_BYTES * copies


def state_bytes(model: TrainableModel) -> int:
    """Of a copy of all that training has made of a model."""
    states = (model.params, model.optimizer.state(), model.grads)
    return sum(tensor.nbytes for tensors in states for tensor in tensors.values())


def pass_bytes(model: TrainableModel, batch: MicroBatch) -> int:
    """Of the activations that a pass over a micro-batch keeps: what its backward half reads, or,
    where blocks are recomputed, their inputs and one block's share of that."""
    config, kept = model.base.config, model.kept_bytes()
    kept_bytes = (kept.row + kept.token) * batch.num_rows
    if not batch.recompute:
        return kept_bytes
    inputs = config.num_layers * config.hidden_size * batch.num_rows * FLOAT32_BYTES
    return inputs + kept_bytes // config.num_layers


def described(spec: LoraSpec, base: BaseModel) -> str:
    kind = f"an adapter of rank {spec.rank}" if spec.rank else "a full fine-tune"
    num = num_trained(spec, base)
    return f"{kind} of {base.name} ({num / 1e6:.1f} million numbers in training)"
