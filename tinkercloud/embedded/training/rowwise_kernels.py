# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportReturnType=false
"""`rowwise` for GPUs, each part one pass over memory, as Triton kernels: a `rowwise.RowWise`.

Rounded where `rowwise` rounds. What the kernels do not cover (GELU, pairs of neighbours, a part of
a head that is rotated) is computed by it.

Axes: T rows, H heads, D the last axis, I intermediate.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkercloud.embedded.training import rowwise

_COLUMNS = 1024  # of a row that a program of the gated product has
_FEW = 2048  # numbers of a program for which four warps are enough


def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows = _as_heads(x)
    if rows is None:
        return rowwise.norm(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inverse = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    sizes = _sizes(rows)
    _norm[(len(rows),)](
        *(rows, weight, out, inverse, rows.stride(0), rows.stride(1), eps),
        IS_WIDE=weight.dtype != x.dtype,
        **sizes,
        num_warps=_num_warps(sizes),
    )
    return out, inverse


def norm_gradient(x: Tensor, inverse: Tensor, weight: Tensor, dy: Tensor, into: Tensor) -> None:
    rows = _as_heads(x)
    if rows is None or not (dy.is_contiguous() and into.is_contiguous()):
        rowwise.norm_gradient(x, inverse, weight, dy, into)
        return
    sizes = _sizes(rows)
    _norm_gradient[(len(rows),)](
        *(rows, inverse, weight, dy, into, rows.stride(0), rows.stride(1)),
        **sizes,
        num_warps=_num_warps(sizes),
    )


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    if interleaved or 2 * cos.shape[-1] != x.shape[-1] or x.stride(-1) != 1 or len(x) == 0:
        rowwise.rotate_(x, cos, sin, interleaved=interleaved)
        return
    num_heads, size = x.shape[1:]
    _rotate[(len(x),)](
        *(x, cos.contiguous(), sin.contiguous(), x.stride(0), x.stride(1)),
        HEADS=num_heads,
        HALF=size // 2,
        PADDED_HEADS=triton.next_power_of_2(num_heads),
        PADDED_HALF=triton.next_power_of_2(size // 2),
        num_warps=4,
    )


def gated(activation: str, gates: Tensor) -> Tensor:
    if activation != "silu" or not gates.is_contiguous() or len(gates) == 0:
        return rowwise.gated(activation, gates)
    size = gates.shape[1] // 2
    out = gates.new_empty(len(gates), size)
    _gated[(len(gates), triton.cdiv(size, _COLUMNS))](gates, out, size, COLUMNS=_COLUMNS)
    return out


def gated_gradient(activation: str, gates: Tensor, dproduct: Tensor) -> Tensor:
    contiguous = gates.is_contiguous() and dproduct.is_contiguous()
    if activation != "silu" or not contiguous or len(gates) == 0:
        return rowwise.gated_gradient(activation, gates, dproduct)
    size = gates.shape[1] // 2
    dgates = torch.empty_like(gates)
    grid = (len(gates), triton.cdiv(size, _COLUMNS))
    _gated_gradient[grid](gates, dproduct, dgates, size, COLUMNS=_COLUMNS)
    return dgates


def _as_heads(x: Tensor) -> Tensor | None:
    """x (T, D) or (T, H, D) as (T, H, D); None where its last axis is not contiguous in memory."""
    if x.dim() not in (2, 3) or x.stride(-1) != 1 or len(x) == 0:
        return None
    return x if x.dim() == 3 else x[:, None]


def _sizes(rows: Tensor) -> dict[str, int]:
    _, num_heads, size = rows.shape
    padded = {"PADDED_HEADS": num_heads, "PADDED_SIZE": size}
    powers = {name: triton.next_power_of_2(number) for name, number in padded.items()}
    return {"HEADS": num_heads, "SIZE": size, **powers}


def _num_warps(sizes: dict[str, int]) -> int:
    return 4 if sizes["PADDED_HEADS"] * sizes["PADDED_SIZE"] <= _FEW else 8


@triton.jit
def _norm(  # noqa: PLR0913 - a kernel
    x, weight, out, inverse, row_stride, head_stride, eps,
    IS_WIDE: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED_HEADS: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
):  # fmt: skip
    """A program: all heads of one row. IS_WIDE: the weight is float32, x is not."""
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED_SIZE)
    real = (head < HEADS)[:, None] & (column < SIZE)[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    at = row * row_stride + head[:, None] * head_stride + column[None, :]
    wide = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
    normed = wide * factor[:, None]
    if not IS_WIDE:
        normed = normed.to(kind).to(tl.float32)
    flat = row * HEADS + head
    place = flat[:, None] * SIZE + column[None, :]
    tl.store(out + place, (normed * scale).to(kind), mask=real)
    tl.store(inverse + flat, factor, mask=head < HEADS)


@triton.jit
def _norm_gradient(  # noqa: PLR0913 - a kernel
    x, inverse, weight, dy, into, row_stride, head_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED_HEADS: tl.constexpr, PADDED_SIZE: tl.constexpr,
):  # fmt: skip
    """A program: all heads of one row. dx = inverse * (grad - x * inverse^2 * mean(grad * x))."""
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED_SIZE)
    real = (head < HEADS)[:, None] & (column < SIZE)[None, :]
    at = row * row_stride + head[:, None] * head_stride + column[None, :]
    wide = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    flat = row * HEADS + head
    place = flat[:, None] * SIZE + column[None, :]
    factor = tl.load(inverse + flat, mask=head < HEADS, other=0.0)
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
    grad = tl.load(dy + place, mask=real, other=0.0).to(tl.float32) * scale
    grad = grad.to(dy.dtype.element_ty).to(tl.float32)
    along = tl.sum(grad * wide, 1) * factor * factor * factor / -SIZE
    kind: tl.constexpr = into.dtype.element_ty
    delta = (grad * factor[:, None] + wide * along[:, None]).to(kind).to(tl.float32)
    before = tl.load(into + place, mask=real, other=0.0).to(tl.float32)
    tl.store(into + place, (before + delta).to(kind), mask=real)


@triton.jit
def _rotate(  # noqa: PLR0913 - a kernel
    x, cos, sin, row_stride, head_stride,
    HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):  # fmt: skip
    """A program: all heads of one row."""
    row = tl.program_id(0).to(tl.int64)
    head, half = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED_HALF)
    real = (head < HEADS)[:, None] & (half < HALF)[None, :]
    kind: tl.constexpr = x.dtype.element_ty
    at = x + row * row_stride + head[:, None] * head_stride + half[None, :]
    first = tl.load(at, mask=real, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=real, other=0.0).to(tl.float32)
    angle = row * HALF + half
    c = tl.load(cos + angle, mask=half < HALF, other=0.0).to(kind).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=half < HALF, other=0.0).to(kind).to(tl.float32)[None, :]
    left = (first * c).to(kind).to(tl.float32) - (second * s).to(kind).to(tl.float32)
    right = (second * c).to(kind).to(tl.float32) + (first * s).to(kind).to(tl.float32)
    tl.store(at, left.to(kind), mask=real)
    tl.store(at + HALF, right.to(kind), mask=real)


@triton.jit
def _gated(gates, out, size, COLUMNS: tl.constexpr):
    """A program: some columns of one row. gates: gate and up side by side."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < size
    kind: tl.constexpr = out.dtype.element_ty
    gate = tl.load(gates + row * 2 * size + column, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(gates + row * 2 * size + size + column, mask=valid, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + row * size + column, (active * up).to(kind), mask=valid)


@triton.jit
def _gated_gradient(gates, dproduct, dgates, size, COLUMNS: tl.constexpr):
    """A program: some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < size
    kind: tl.constexpr = dgates.dtype.element_ty
    at = row * 2 * size + column
    gate = tl.load(gates + at, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(gates + at + size, mask=valid, other=0.0).to(tl.float32)
    grad = tl.load(dproduct + row * size + column, mask=valid, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    active = (gate * sigmoid).to(kind).to(tl.float32)
    through = (grad * up).to(kind).to(tl.float32)
    dgate = through * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(dgates + at, dgate.to(kind), mask=valid)
    tl.store(dgates + at + size, (grad * active).to(kind), mask=valid)
