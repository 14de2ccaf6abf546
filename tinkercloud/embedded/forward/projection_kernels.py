# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportReturnType=false
"""Products of few rows with matrices that read the same, adapters added, as Triton kernels.

A product of one row is bound by reading the matrix. On an H200 cuBLAS reads a network's smaller
ones at 0.3 to 3 TB/s of 4.4, each by a launch of its own. Here one row is multiplied without matrix
units, up to MAX_ROWS with them, several matrices in one launch. For more rows cuBLAS is as fast,
and the factors of all slots are multiplied at once (`AdapterBank.delta`).

Axes: B rows, S slots, R ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkercloud.embedded.forward.adapter_bank import AdapterBank
from tinkercloud.embedded.forward.decode_kernels import swiglu

MAX_ROWS = 16
_MOST = 3  # matrices of one launch
_COLUMNS = 1024  # of inputs that a program reads at a time
_TILE_OUTPUTS, _TILE_COLUMNS = 32, 128  # of a program that multiplies by matrix units


@dataclass(frozen=True, slots=True)
class Bank:
    """The adapters of a step. slots int32 (B,): which is each row's, or NO_ADAPTER."""

    factors: AdapterBank
    slots: Tensor


def can_project(x: Tensor) -> bool:
    """Matrix units multiply float32 exactly at a fraction of the rate of cuBLAS."""
    return len(x) == 1 or (len(x) <= MAX_ROWS and x.dtype.itemsize == 2)


def project(
    x: Tensor, names: Sequence[str], weights: Mapping[str, Tensor], bank: Bank | None
) -> tuple[Tensor, ...]:
    """x (B, in), up to three matrices (out, in) -> (B, out) of each, with biases and adapters."""
    groups = [names] if _are_alike(names, weights, bank) else [[name] for name in names]
    outs = {name: x.new_empty(len(x), weights[name].shape[0]) for name in names}
    for group in groups:
        _launch(x, group, weights, bank, [outs[name] for name in group], gated=False)
    return tuple(outs.values())


def project_gated(
    x: Tensor, gate: str, up: str, weights: Mapping[str, Tensor], bank: Bank | None
) -> Tensor:
    """silu(gate x) * (up x), (B, I)."""
    if not _are_alike((gate, up), weights, bank):
        return swiglu(*project(x, (gate, up), weights, bank))
    out = x.new_empty(len(x), weights[gate].shape[0])
    _launch(x, (gate, up), weights, bank, (out, out), gated=True)
    return out


def _are_alike(names: Sequence[str], weights: Mapping[str, Tensor], bank: Bank | None) -> bool:
    """Whether all have biases and adapters, or none has."""
    kinds = {
        (f"{name}.bias" in weights, bank is not None and name in bank.factors) for name in names
    }
    return len(kinds) == 1


def _launch(  # noqa: PLR0913 - what both of the above have
    x: Tensor,
    names: Sequence[str],
    weights: Mapping[str, Tensor],
    bank: Bank | None,
    outs: Sequence[Tensor],
    *,
    gated: bool,
) -> None:
    matrices = [weights[name] for name in names]
    biases = [weights.get(f"{name}.bias", x) for name in names]
    inner, ups, slots, rank = x, [x], x, 0
    if bank is not None and names[0] in bank.factors:
        ups = [bank.factors.up[name] for name in names]
        inner, slots, rank = _shrunk(x, names, bank), bank.slots, ups[0].shape[1]
    wide, size = len(x) > 1, x.shape[1]
    outputs = _TILE_OUTPUTS if wide else 2 if size <= _COLUMNS else 1
    columns = _TILE_COLUMNS if wide else min(_COLUMNS, triton.next_power_of_2(size))
    programs = [triton.cdiv(matrix.shape[0], outputs) for matrix in matrices]
    _project[(programs[0] if gated else sum(programs),)](
        *(x, inner, slots, len(x)),
        *_padded(matrices),
        *_padded(biases),
        *_padded(ups),
        *_padded(outs),
        *_padded([matrix.shape[0] for matrix in matrices]),
        *_padded(programs)[: _MOST - 1],
        IN=size,
        RANK=rank,
        PADDED_RANK=triton.next_power_of_2(max(1, rank)),
        BIAS=f"{names[0]}.bias" in weights,
        ADAPTED=rank > 0,
        MATRICES=len(names),
        GATED=gated,
        ROWS=MAX_ROWS if wide else 1,
        OUTPUTS=outputs,
        COLUMNS=columns,
        EVEN=size % columns == 0,
        num_warps=4,
    )


def _padded(values: Sequence) -> list:
    """As many as a launch takes; those that are not there are never read."""
    return [*values, *[values[-1]] * (_MOST - len(values))]


def _shrunk(x: Tensor, names: Sequence[str], bank: Bank) -> Tensor:
    """scale A x of each matrix and row, float32 (matrices, B, R)."""
    downs = [bank.factors.down[name] for name in names]
    rank = downs[0].shape[1]
    inner = torch.empty(len(names), len(x), rank, device=x.device)
    _shrink[(len(x), rank, len(names))](
        *(x, *_padded(downs), bank.factors.scales, bank.slots, inner, x.shape[1]), COLUMNS=_COLUMNS
    )
    return inner


@triton.jit
def _shrink(  # noqa: PLR0913 - a kernel
    x, down_0, down_1, down_2, scales, slots, inner, size, COLUMNS: tl.constexpr
):
    """A program: one row, one rank, one matrix."""
    row = tl.program_id(0).to(tl.int64)
    rank = tl.program_id(1)
    which = tl.program_id(2)
    num_ranks = tl.num_programs(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        factors = down_0
        if which == 1:
            factors = down_1
        if which == 2:
            factors = down_2
        factors += (slot * num_ranks + rank) * size
        total = tl.zeros([COLUMNS], tl.float32)
        for start in range(0, size, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            valid = column < size
            left = tl.load(x + row * size + column, mask=valid, other=0.0).to(tl.float32)
            total += left * tl.load(factors + column, mask=valid, other=0.0)
        result = tl.sum(total, 0) * tl.load(scales + slot)
        tl.store(inner + (which * tl.num_programs(0) + row) * num_ranks + rank, result)


@triton.jit
def _products(  # noqa: PLR0913 - a kernel
    x, num_rows, weight, output, num_outputs,
    IN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Of some outputs and all rows, float32 (OUTPUTS, ROWS)."""
    column = tl.arange(0, COLUMNS)
    real = (output < num_outputs)[:, None]
    matrix = weight + output.to(tl.int64)[:, None] * IN + column[None, :]
    if ROWS == 1:
        sums = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
        for start in range(0, IN, COLUMNS):
            if EVEN:
                tile = tl.load(matrix + start, mask=real, other=0.0).to(tl.float32)
                vector = tl.load(x + start + column).to(tl.float32)
            else:
                valid = start + column < IN
                there = real & valid[None, :]
                tile = tl.load(matrix + start, mask=there, other=0.0).to(tl.float32)
                vector = tl.load(x + start + column, mask=valid, other=0.0).to(tl.float32)
            sums += tile * vector[None, :]
        total = tl.sum(sums, 1)[:, None]
    else:
        row = tl.arange(0, ROWS)
        vectors = x + row[None, :] * IN + column[:, None]
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for start in tl.range(0, IN, COLUMNS, num_stages=4):
            if EVEN:
                tile = tl.load(matrix + start, mask=real, other=0.0)
                inputs = tl.load(vectors + start, mask=(row < num_rows)[None, :], other=0.0)
            else:
                valid = start + column < IN
                tile = tl.load(matrix + start, mask=real & valid[None, :], other=0.0)
                there = (row < num_rows)[None, :] & valid[:, None]
                inputs = tl.load(vectors + start, mask=there, other=0.0)
            total = tl.dot(tile, inputs, total, input_precision="ieee")
    return total


@triton.jit
def _adapted(  # noqa: PLR0913 - a kernel
    inner, up, slots, num_rows, output, num_outputs,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """What the adapters add, float32 (OUTPUTS, ROWS). inner: of this matrix."""
    row = tl.arange(0, ROWS)
    real = row < num_rows
    slot = tl.load(slots + row, mask=real, other=-1).to(tl.int64)
    has = slot >= 0
    valid = (output < num_outputs)[:, None]
    if ROWS == 1:
        rank = tl.arange(0, PADDED_RANK)
        there = (rank < RANK)[None, :] & (has[:, None] & (output < num_outputs)[:, None])
        factor = tl.load(inner + rank, mask=rank < RANK, other=0.0)
        at = up + (slot[:, None] * RANK + rank[None, :]) * num_outputs + output[:, None]
        factor = tl.where((rank < RANK)[None, :] & has[:, None], factor[None, :], 0.0)
        delta = tl.sum(factor * tl.load(at, mask=there, other=0.0), 1)[:, None]
    else:
        delta = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for rank in range(RANK):
            factor = tl.load(inner + row * RANK + rank, mask=has, other=0.0)
            at = up + (slot * RANK + rank)[None, :] * num_outputs + output[:, None]
            delta += factor[None, :] * tl.load(at, mask=valid & has[None, :], other=0.0)
    return delta


@triton.jit
def _linear(  # noqa: PLR0913 - a kernel
    x, inner, slots, num_rows, weight, bias, up, output, num_outputs, which,
    IN: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr, BIAS: tl.constexpr,
    ADAPTED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Of some outputs and all rows, float32 (OUTPUTS, ROWS), rounded as x's type is."""
    kind: tl.constexpr = x.dtype.element_ty
    if ADAPTED:  # before the product: these loads do not depend on it
        own = inner + which * num_rows * RANK
        delta = _adapted(
            own, up, slots, num_rows, output, num_outputs, RANK, PADDED_RANK, ROWS, OUTPUTS
        )
    total = _products(x, num_rows, weight, output, num_outputs, IN, ROWS, OUTPUTS, COLUMNS, EVEN)
    if BIAS:
        offset = tl.load(bias + output, mask=output < num_outputs, other=0.0).to(tl.float32)
        total += offset[:, None]
    total = total.to(kind).to(tl.float32)
    if ADAPTED:
        total = (total + delta.to(kind).to(tl.float32)).to(kind).to(tl.float32)
    return total


@triton.jit
def _project(  # noqa: PLR0913 - a kernel
    x, inner, slots, num_rows,
    weight_0, weight_1, weight_2, bias_0, bias_1, bias_2, up_0, up_1, up_2, y_0, y_1, y_2,
    outputs_0, outputs_1, outputs_2, programs_0, programs_1,
    IN: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr, BIAS: tl.constexpr,
    ADAPTED: tl.constexpr, MATRICES: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A program: some outputs of one matrix; of both with GATED."""
    program = tl.program_id(0)
    within = tl.arange(0, OUTPUTS)
    if GATED:
        output = program * OUTPUTS + within
        gate = _linear(
            x, inner, slots, num_rows, weight_0, bias_0, up_0, output, outputs_0, 0,
            IN, RANK, PADDED_RANK, BIAS, ADAPTED, ROWS, OUTPUTS, COLUMNS, EVEN,
        )  # fmt: skip
        other = _linear(
            x, inner, slots, num_rows, weight_1, bias_1, up_1, output, outputs_0, 1,
            IN, RANK, PADDED_RANK, BIAS, ADAPTED, ROWS, OUTPUTS, COLUMNS, EVEN,
        )  # fmt: skip
        active = (gate / (1.0 + tl.exp(-gate))).to(y_0.dtype.element_ty).to(tl.float32)
        _store(y_0, active * other, output, outputs_0, num_rows, ROWS)
    elif MATRICES == 1:  # noqa: SIM114 - decided when it is compiled
        output = program * OUTPUTS + within
        total = _linear(
            x, inner, slots, num_rows, weight_0, bias_0, up_0, output, outputs_0, 0,
            IN, RANK, PADDED_RANK, BIAS, ADAPTED, ROWS, OUTPUTS, COLUMNS, EVEN,
        )  # fmt: skip
        _store(y_0, total, output, outputs_0, num_rows, ROWS)
    elif program < programs_0:
        output = program * OUTPUTS + within
        total = _linear(
            x, inner, slots, num_rows, weight_0, bias_0, up_0, output, outputs_0, 0,
            IN, RANK, PADDED_RANK, BIAS, ADAPTED, ROWS, OUTPUTS, COLUMNS, EVEN,
        )  # fmt: skip
        _store(y_0, total, output, outputs_0, num_rows, ROWS)
    elif program < programs_0 + programs_1:
        output = (program - programs_0) * OUTPUTS + within
        total = _linear(
            x, inner, slots, num_rows, weight_1, bias_1, up_1, output, outputs_1, 1,
            IN, RANK, PADDED_RANK, BIAS, ADAPTED, ROWS, OUTPUTS, COLUMNS, EVEN,
        )  # fmt: skip
        _store(y_1, total, output, outputs_1, num_rows, ROWS)
    else:
        output = (program - programs_0 - programs_1) * OUTPUTS + within
        total = _linear(
            x, inner, slots, num_rows, weight_2, bias_2, up_2, output, outputs_2, 2,
            IN, RANK, PADDED_RANK, BIAS, ADAPTED, ROWS, OUTPUTS, COLUMNS, EVEN,
        )  # fmt: skip
        _store(y_2, total, output, outputs_2, num_rows, ROWS)


@triton.jit
def _store(y, total, output, num_outputs, num_rows, ROWS: tl.constexpr):  # noqa: PLR0913 - a kernel
    """total (OUTPUTS, ROWS) to y (B, out)."""
    row = tl.arange(0, ROWS)
    at = y + row[None, :] * num_outputs + output[:, None]
    there = (output < num_outputs)[:, None] & (row < num_rows)[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=there)
