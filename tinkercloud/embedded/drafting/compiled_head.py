"""A draft head on the products of the compiled pass.

Weights and what they multiply are rounded to bfloat16, whatever the target's numbers are: half of
the memory to read is most of a step's time, and what a head computes changes drafts only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tinkercloud.embedded.native.packed import PackedMatrix, pack
from tinkercloud.embedded.native.train_bindings import training_team
from tinkercloud.speculative.head.head import MODULES, Head, Params

Product = Callable[[Tensor, PackedMatrix], Tensor]
"""x (M, K) float32 times weights [N, K] transposed: (M, N) float32."""


@dataclass(frozen=True, slots=True)
class _Joined:
    """sizes: outputs of each module."""

    matrix: PackedMatrix
    sizes: tuple[int, ...]


class PackedParams(dict[str, Tensor]):
    """A head's parameters; what `CompiledHead` reads of its matrices is packed."""

    def __init__(self, params: Params):
        super().__init__(params)
        with training_team() as team:
            self.joined: dict[tuple[str, ...], _Joined] = {
                names: _Joined(
                    pack(team, torch.cat([params[n].detach() for n in names]).bfloat16()),
                    tuple(len(params[n]) for n in names),
                )
                for names in MODULES
            }


class CompiledHead(Head):
    """Takes `PackedParams`."""

    def __init__(self, head: Head, product: Product):
        super().__init__(head.config, head.frozen)
        self._product = product
        with training_team() as team:
            self._unembed = pack(team, head.frozen.unembed.bfloat16())

    def placed(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return PackedParams(super().placed(params))

    def _unembedded(self, x: Tensor) -> Tensor:
        return self._multiplied(x, self._unembed)

    def _linears(self, params: Params, names: tuple[str, ...], x: Tensor) -> list[Tensor]:
        assert isinstance(params, PackedParams)
        joined = params.joined[names]
        return list(self._multiplied(x, joined.matrix).split(joined.sizes, -1))

    def _multiplied(self, x: Tensor, matrix: PackedMatrix) -> Tensor:
        rows = self._product(x.reshape(-1, x.shape[-1]).contiguous(), matrix)
        return rows.view(*x.shape[:-1], -1)
