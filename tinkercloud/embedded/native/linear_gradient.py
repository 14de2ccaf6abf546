"""The gradient of linear modules that read the same rows, and of their adapters
(linear_gradient.c).

Axes: T rows, K inputs, N outputs of all the modules side by side, R rank.
"""

import ctypes as c
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tinkercloud.embedded.native import structures as mirror
from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.native.packed import PackedMatrix
from tinkercloud.embedded.native.team import Team


@dataclass(frozen=True, slots=True)
class Factors:
    """One module's adapter, a (R, in) and b (out, R), and the accumulators of its gradient, all
    float32."""

    a: Tensor
    b: Tensor
    da: Tensor
    db: Tensor


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Rows first..first + count - 1 have read one adapter. factors: of each module, None where it
    has none."""

    first: int
    count: int
    rank: int
    scale: float
    factors: Sequence[Factors | None]


@dataclass(frozen=True, slots=True)
class TargetGradients:
    """The gradients g of the log-probabilities of some targets: logits then have the gradient
    sum of g (onehot - softmax) over a row's targets.

    norms: float64 (T,), the log of the sum of exp of each row of logits; None where probabilities
    take the logits' place. rows int64, ascending, ids int64, gradients float32: of each target.
    """

    norms: Tensor | None
    rows: Tensor
    ids: Tensor
    gradients: Tensor

    def totals(self, num_rows: int) -> Tensor:
        """The sum of g over the targets of each row (T,)."""
        return self.gradients.new_zeros(num_rows).index_add_(0, self.rows, self.gradients)

    def to_gradient_(self, probabilities: Tensor) -> Tensor:
        """In place (T, V): the gradient of the logits that have these probabilities."""
        num_rows, size = probabilities.shape
        probabilities.mul_(-self.totals(num_rows)[:, None])
        places = self.rows * size + self.ids
        probabilities.view(-1).index_add_(0, places, self.gradients)
        return probabilities

    def request(self, num_rows: int) -> tuple[mirror.SoftmaxGradient, list[Tensor]]:
        """For C, and what it refers to."""
        starts = torch.searchsorted(self.rows, torch.arange(num_rows + 1))
        totals, ids, gradients = self.totals(num_rows), self.ids.contiguous(), self.gradients
        norms = None if self.norms is None else _address(self.norms, torch.float64)
        entries = (_address(starts, torch.int64), _address(ids, torch.int64), _address(gradients))
        request = mirror.SoftmaxGradient(norms, _address(totals), *entries)
        return request, [totals, starts, ids]


@dataclass(frozen=True, slots=True)
class Gates:
    """numbers (T, 2 F): gate and up side by side, in the model's type, as `layered_pass` keeps
    them. activation: of gate."""

    numbers: Tensor
    activation: str

    @property
    def width(self) -> int:
        return self.numbers.shape[1] // 2

    @property
    def address(self) -> int:
        return _address(self.numbers, self.numbers.dtype)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The gradient of what modules with these matrices have put out, or what it follows from.

    rows: float32 (T, N), a row's numbers side by side: the gradient itself; with `targets` the
    logits of a single module; with `gates` (T, F) the gradient of their gated product, where the
    two modules have put out gate and up. columns: the first column of each module.
    """

    matrices: Sequence[PackedMatrix]
    rows: Tensor
    columns: Sequence[int]
    targets: TargetGradients | None = None
    gates: Gates | None = None


def linear_gradient(
    team: Team,
    x: Tensor | Gates,
    outputs: Outputs,
    adapted: Sequence[AdaptedRows] = (),
    *,
    wants_dx: bool = True,
) -> Tensor | None:
    """dx (T, K) float32, if it is wanted; adds to the adapters' gradients. x float32 (T, K): what
    the modules have read; of gates their gated product. adapted: ascending, disjoint.

    Products read numbers of the matrices' type. A row of dx depends on that row alone, and the
    gradient of an adapter on the rows that have read it. Raises MemoryError.
    """
    matrices = outputs.matrices
    num_rows, size = len(outputs.rows), matrices[0].shape[1]
    dx = torch.empty(num_rows, size) if wants_dx else None
    rows = outputs.rows
    assert rows.dtype == torch.float32
    assert rows.stride(1) == 1
    assert all(matrix.shape[1] == size for matrix in matrices)
    assert (x.width if isinstance(x, Gates) else x.shape[1]) == size
    assert outputs.gates is None or outputs.gates.width == rows.shape[1] == rows.stride(0)
    modules = [
        (matrix.address, matrix.shape[0], matrix.width, column)
        for matrix, column in zip(matrices, outputs.columns, strict=True)
    ]
    segments = [_segment(of_rows) for of_rows in adapted]
    ends = [of_rows.first + of_rows.count for of_rows in adapted]
    starts = [*(of_rows.first for of_rows in adapted), num_rows]
    assert all(a <= b for a, b in zip([0, *ends], starts, strict=True)), "ascending and disjoint"
    softmax, kept = outputs.targets.request(num_rows) if outputs.targets else (None, [])
    gates = x if isinstance(x, Gates) else outputs.gates
    activation = 0 if gates is None else mirror.ACTIVATIONS.index(gates.activation)
    request = mirror.LinearGradient(
        *(matrices[0].is_narrow, activation, num_rows, size, len(modules)),
        (mirror.ModuleGradient * len(modules))(*modules),
        None if isinstance(x, Gates) else _address(x),
        x.address if isinstance(x, Gates) else None,
        *(rows.data_ptr(), rows.stride(0)),
        None if softmax is None else c.pointer(softmax),
        None if outputs.gates is None else outputs.gates.address,
        None if dx is None else _address(dx),
        *(len(segments), (mirror.SegmentGradient * len(segments))(*segments)),
    )
    if _library().linear_gradient(team.handle, c.byref(request)):
        raise MemoryError(f"no memory for the gradient of {num_rows} rows")
    del kept
    return dx


def _segment(rows: AdaptedRows) -> mirror.SegmentGradient:
    factors = [_factors(rows.rank, module) for module in rows.factors]
    entries = (mirror.LoraGradient * len(factors))(*factors)
    return mirror.SegmentGradient(rows.first, rows.count, rows.rank, rows.scale, entries)


def _factors(rank: int, module: Factors | None) -> mirror.LoraGradient:
    if module is None:
        return mirror.LoraGradient()
    assert module.a.shape[0] == module.b.shape[1] == rank
    assert module.da.shape == module.a.shape
    assert module.db.shape == module.b.shape
    tensors = (module.a, module.b, module.da, module.db)
    return mirror.LoraGradient(*map(_address, tensors))


def _address(x: Tensor, dtype: torch.dtype = torch.float32) -> int:
    assert x.is_contiguous()
    assert x.dtype == dtype
    return x.data_ptr()


@cache
def _library() -> c.CDLL:
    loaded = library()
    assert loaded is not None, "asked for only where there is a library"
    loaded.linear_gradient.argtypes = (c.c_void_p, c.c_void_p)
    return loaded
