"""An architecture's forward pass under autograd over frozen weights, without a copy of those that
are packed."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tinkercloud.embedded.model.packed_tensors import PackedTensors
from tinkercloud.embedded.native.linear_gradient import Outputs, linear_gradient
from tinkercloud.embedded.native.packed import PackedMatrix, product
from tinkercloud.embedded.native.train_bindings import training_team
from tinkercloud.embedded.training.context import TrainContext
from tinkercloud.weights.adapters import Adapter


def frozen_context(
    weights: Mapping[str, Tensor], lengths: Sequence[int], entry: tuple[Adapter, float] | None
) -> TrainContext:
    """entry: an adapter and its scale, the one part that has a gradient."""
    adapter, scale = entry or (None, 1.0)
    if isinstance(weights, PackedTensors):
        return PackedContext(weights, lengths, adapter=adapter, scale=scale)
    return TrainContext(weights, lengths, adapter=adapter, scale=scale)


class PackedContext(TrainContext):
    def __init__(
        self,
        weights: PackedTensors,
        lengths: Sequence[int],
        *,
        adapter: Adapter | None = None,
        scale: float = 1.0,
    ):
        super().__init__(weights, lengths, adapter=adapter, scale=scale)
        self._tensors = weights

    def embed(self, tokens: Tensor) -> Tensor:
        return self._tensors.rows("model.embed_tokens", tokens)

    def _product(self, name: str, x: Tensor) -> Tensor:
        packed = self._tensors.packed
        bias = packed.vectors.get(f"{name}.bias")
        y = _Product.apply(x.float().contiguous(), packed.matrices[name], bias)
        assert isinstance(y, Tensor)
        return y.to(x.dtype)


class _Product(torch.autograd.Function):
    """`packed.product`, with the gradient of x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.matrix = matrix
        ctx.save_for_backward(x)
        with training_team() as team:
            return product(team, x, matrix, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        with training_team() as team:
            return linear_gradient(team, x, Outputs([ctx.matrix], dy.contiguous(), [0])), None, None
