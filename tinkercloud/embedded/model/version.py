"""Published weights, as the sampling engine reads them."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.packed_tensors import PackedTensors
from tinkercloud.weights.adapters import Adapter


@dataclass(frozen=True, slots=True)
class Version:
    """Immutable published weights. `weights` are the base's, or a full fine-tune's, held as the
    base's are. origin: the model that was published; "" for a base or a checkpoint."""

    id: str
    base: BaseModel
    weights: Mapping[str, Tensor]
    adapter: Adapter | None
    scale: float
    origin: str = ""

    @property
    def own_bytes(self) -> int:
        """Of its tensors, without those it shares with the base."""
        if self.adapter is not None:
            return sum(a.nbytes + b.nbytes for a, b in self.adapter.values())
        if self.weights is self.base.weights:
            return 0
        if isinstance(self.weights, PackedTensors):
            return self.weights.nbytes
        return sum({id(t): t.nbytes for t in self.weights.values()}.values())

    @property
    def entry(self) -> tuple[Adapter, float] | None:
        return (self.adapter, self.scale) if self.adapter is not None else None
