"""Weight matrices packed for the compiled products (packed.h), and these products by themselves.

Axes: M rows, N outputs, K inputs.
"""

import ctypes as c
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.native.structures import Packing
from tinkercloud.embedded.native.team import Team

PANEL = 16  # outputs
_INPUTS = {torch.float32: 1, torch.bfloat16: 32}  # what K is padded to


KEYS = "self_attn.keys"


def num_key_errors(head_dim: int, dtype: torch.dtype) -> int:
    """Of how many dimensions of a key the rounding errors lie in the cache too. SmolLM2's mean
    distance from float32, in multiples of what rounding the weights alone gives, on 9 texts and on
    10 samples: 1.51 and 1.44 with none, 1.33 and 1.25 with 16, 1.30 and 1.27 with 24."""
    return min(16, head_dim) if dtype == torch.bfloat16 else 0


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Weights [N, K]: float32 as (N / 16, K, 16), bfloat16 as (N / 16, K / 2, 16, 2) with K rounded
    up to 32; N is rounded up to 16, and zeros fill what is beyond. In bfloat16 there may be spare
    inputs after these: those of `repeat`."""

    packed: Tensor
    shape: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        return self.packed.dtype

    @property
    def is_narrow(self) -> bool:
        return self.dtype == torch.bfloat16

    @property
    def address(self) -> int:
        return _address(self.packed, self.dtype)

    @property
    def width(self) -> int:
        """Inputs of a panel, in all."""
        return self.packed.shape[1] * (2 if self.is_narrow else 1)

    def repeat(self, inputs: Tensor) -> None:
        """Writes the weights of these inputs, int64 (C,), to the spare inputs too."""
        first = _padded(self.shape[1], self.dtype)
        assert self.is_narrow
        assert first + len(inputs) <= self.width
        at = first + torch.arange(len(inputs))
        weights = self.packed[:, inputs // 2, :, inputs % 2]  # (C, N / 16, 16)
        self.packed[:, at // 2, :, at % 2] = weights


def packed_shape(shape: tuple[int, int], dtype: torch.dtype, num_spare: int = 0) -> tuple[int, ...]:
    """Of the tensor that holds weights [N, K] packed, with so many spare inputs at least."""
    panels = -(-shape[0] // PANEL)
    inputs = _padded(shape[1], dtype) + _padded(num_spare, dtype)
    if dtype == torch.bfloat16:
        return panels, inputs // 2, PANEL, 2
    return panels, inputs, PANEL


def _padded(inputs: int, dtype: torch.dtype) -> int:
    return -(-inputs // _INPUTS[dtype]) * _INPUTS[dtype]


def pack(team: Team, weight: Tensor, into: Tensor | None = None) -> PackedMatrix:
    """weight: float32 or bfloat16 (N, K), on the CPU. into: memory for it, of `packed_shape`."""
    return _pack(team, [weight], [_empty(weight) if into is None else into])[0]


def pack_all(team: Team, weights: Sequence[Tensor]) -> list[PackedMatrix]:
    """`pack` of each, in one call."""
    return _pack(team, weights, [_empty(weight) for weight in weights])


def _pack(team: Team, weights: Sequence[Tensor], into: Sequence[Tensor]) -> list[PackedMatrix]:
    sources = [weight.detach().contiguous() for weight in weights]
    matrices = [
        PackedMatrix(memory, (rows.shape[0], rows.shape[1]))
        for rows, memory in zip(sources, into, strict=True)
    ]
    each = (Packing * len(matrices))(
        *[
            (_matrix(matrix), _address(rows, matrix.dtype), _packed(matrix))
            for rows, matrix in zip(sources, matrices, strict=True)
        ]
    )
    _library().pack(team.handle, each, len(each))
    return matrices


def _empty(weight: Tensor) -> Tensor:
    shape = (weight.shape[0], weight.shape[1])
    return torch.empty(packed_shape(shape, weight.dtype), dtype=weight.dtype)


def unpack(team: Team, matrix: PackedMatrix) -> Tensor:
    """A copy (N, K)."""
    rows = torch.empty(matrix.shape, dtype=matrix.dtype)
    packing = Packing(_matrix(matrix), _packed(matrix), rows.data_ptr())
    _library().unpack(team.handle, packing, 1)
    return rows


def unpack_rows(matrix: PackedMatrix, ids: Tensor) -> Tensor:
    """A copy of some rows: int64 ids (n,) -> (n, K)."""
    rows = matrix.packed[ids // PANEL, :, ids % PANEL]
    return rows.reshape(len(ids), matrix.width)[:, : matrix.shape[1]].contiguous()


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """A network's tensors as the compiled pass reads them, by Hugging Face module name; a tied
    unembedding is the embedding's matrix. vectors: norms and biases, float32. salient: of each
    module of the pass, in bfloat16 alone, the inputs that it reads as pairs of a rounded number and
    its rounding error (network.h): int64 (C,), ascending; of the product of queries with keys,
    whose name ends in KEYS, dimensions of keys (Hkv, `num_key_errors`)."""

    matrices: Mapping[str, PackedMatrix]
    vectors: Mapping[str, Tensor]
    salient: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    @property
    def dtype(self) -> torch.dtype:
        return self.matrices["model.embed_tokens"].dtype

    def with_salient(self, inputs: Mapping[str, Tensor]) -> "PackedWeights":
        """In the same memory, whose spare inputs are written: what had others is void."""
        for name, chosen in inputs.items():
            if not name.endswith(KEYS):
                self.matrices[name].repeat(chosen)
        return replace(self, salient=inputs)


def product(team: Team, x: Tensor, matrix: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """x (M, K) float32, which is rounded to the weights' type, times the weights transposed, plus
    bias (N,) float32: (M, N) float32. An output's terms are summed by blocks of 64 inputs (in
    bfloat16: pairs; with AMX 1,024 of these), then block by block, in ascending order. Raises
    MemoryError."""
    assert x.shape[1] == matrix.shape[1]
    y = torch.empty(len(x), matrix.shape[0])
    arguments = (len(x), _address(x), None if bias is None else _address(bias), y.data_ptr())
    if _library().product(team.handle, *_matrix(matrix), _packed(matrix), *arguments):
        raise MemoryError(f"no memory for a product of {len(x)} rows")
    return y


@cache
def _library() -> c.CDLL:
    loaded = library()
    assert loaded is not None, "asked for only where there is a library"
    pointer, number = c.c_void_p, c.c_int64
    loaded.pack.argtypes = loaded.unpack.argtypes = (pointer, c.POINTER(Packing), number)
    start = (pointer, *[number] * 4)  # team, is_narrow, N, K, inputs of a panel
    loaded.product.argtypes = (*start, pointer, number, pointer, pointer, pointer)
    return loaded


def _matrix(matrix: PackedMatrix) -> tuple[bool, int, int, int]:
    return matrix.is_narrow, *matrix.shape, matrix.width


def _packed(matrix: PackedMatrix) -> int:
    spare = matrix.width - _padded(matrix.shape[1], matrix.dtype)
    assert tuple(matrix.packed.shape) == packed_shape(matrix.shape, matrix.dtype, spare)
    return _address(matrix.packed, matrix.dtype)


def _address(tensor: Tensor, dtype: torch.dtype = torch.float32) -> int:
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    return tensor.data_ptr()
