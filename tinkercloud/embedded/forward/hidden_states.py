"""The outputs of some layers in a pass, for drafters that read them.

Axes: M rows, L layers, D hidden size.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from tinkercloud.embedded.model.base_model import BaseModel


@dataclass(frozen=True, slots=True)
class LayerStates:
    """A buffer for them. layers: numbered as in `speculative.head.head.HeadConfig`; out
    float32 (M, L, D), on the network's device."""

    layers: tuple[int, ...]
    out: Tensor

    @classmethod
    def empty(cls, layers: tuple[int, ...], num_rows: int, base: BaseModel) -> Self:
        size = base.config.hidden_size
        return cls(layers, torch.empty(num_rows, len(layers), size, device=base.device))

    def rows(self, count: int) -> Self:
        """The first rows, in the same memory."""
        return type(self)(self.layers, self.out[:count])

    def show(self, number: int, x: Tensor) -> None:
        """An `architectures.layers.Show`; rows of x past M are padding."""
        for place, layer in enumerate(self.layers):
            if layer == number:
                self.out[:, place].copy_(x[: len(self.out)])
