# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
"""The operations between the matrix products of a decode step, in few launches, as Triton kernels.

Each rounds to the weights' number type where the plain form (`architectures.layers`) does: in
bfloat16, to round elsewhere moves log-probabilities.

Axes: B rows, D hidden, I intermediate, Hq/Hkv heads, Dh head size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkercloud.embedded.forward.decode_step import Inputs

_COLUMNS = 1024  # that a program reads at a time


def add_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """x (B, D) += added, in place; its root-mean-square norm (B, D)."""
    out = torch.empty_like(x)
    size = x.shape[1]
    _add_norm[(x.shape[0],)](
        *(x, x if added is None else added, weight, out, size, eps),
        ADDS=added is not None,
        PADDED_SIZE=triton.next_power_of_2(size),
    )
    return out


def rotate_and_cache(
    heads: tuple[Tensor, Tensor, Tensor],
    rotary: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor, float] | None,
    cache: tuple[Tensor, Tensor],
    at: Inputs,
) -> None:
    """Rotates q (B, Hq * Dh) in place; writes the rotated k and v (B, Hkv * Dh) to their blocks.

    rotary: cos and sin float32 (B, Dh / 2). norms: of the query and key heads, and their eps.
    cache: keys and values of a layer, as in `BlockPool`.
    """
    (q, k, v), (keys, values) = heads, cache
    num_kv_heads, size, slots = keys.shape[1], keys.shape[2], keys.shape[3]
    num_heads = q.shape[1] // size
    q_norm, k_norm, eps = norms or (q, q, 0.0)
    _rotate_and_cache[(q.shape[0], num_heads + 2 * num_kv_heads)](
        *(q, k, v, *rotary, q_norm, k_norm, keys, values, at.blocks, at.places, eps),
        NORMS=norms is not None,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        SIZE=size,
        PADDED_HALF=triton.next_power_of_2(size // 2),
        SLOTS=slots,
    )


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """(B, I), (B, I) -> (B, I)."""
    out = torch.empty_like(gate)
    count = gate.numel()
    _swiglu[(triton.cdiv(count, _COLUMNS),)](gate, up, out, count, COLUMNS=_COLUMNS)
    return out


@triton.jit
def _add_norm(  # noqa: PLR0913 - a kernel
    x, added, weight, out, size, eps, ADDS: tl.constexpr, PADDED_SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_SIZE)
    valid = column < size
    at = row * size + column
    kind: tl.constexpr = x.dtype.element_ty
    wide = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
    if ADDS:
        more = tl.load(added + at, mask=valid, other=0.0).to(tl.float32)
        rounded = (wide + more).to(kind)
        tl.store(x + at, rounded, mask=valid)
        wide = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = (wide * inverse).to(kind).to(tl.float32)
    scale = tl.load(weight + column, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + at, (scale * normed).to(kind), mask=valid)


@triton.jit
def _normed_rotated(  # noqa: PLR0913 - a kernel
    head, weight, cos, sin, eps,
    NORMS: tl.constexpr, SIZE: tl.constexpr, PADDED_HALF: tl.constexpr,
):  # fmt: skip
    """Both halves of one head, normed and rotated."""
    kind: tl.constexpr = head.dtype.element_ty
    half = tl.arange(0, PADDED_HALF)
    valid = half < SIZE // 2
    first = tl.load(head + half, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(head + SIZE // 2 + half, mask=valid, other=0.0).to(tl.float32)
    if NORMS:
        squares = tl.sum(first * first, 0) + tl.sum(second * second, 0)
        inverse = tl.rsqrt(squares / SIZE + eps)
        low = tl.load(weight + half, mask=valid, other=0.0).to(tl.float32)
        high = tl.load(weight + SIZE // 2 + half, mask=valid, other=0.0).to(tl.float32)
        first = (low * (first * inverse).to(kind).to(tl.float32)).to(kind).to(tl.float32)
        second = (high * (second * inverse).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    c = tl.load(cos + half, mask=valid, other=0.0).to(kind).to(tl.float32)
    s = tl.load(sin + half, mask=valid, other=0.0).to(kind).to(tl.float32)
    left = (first * c).to(kind).to(tl.float32) - (second * s).to(kind).to(tl.float32)
    right = (second * c).to(kind).to(tl.float32) + (first * s).to(kind).to(tl.float32)
    return left.to(kind), right.to(kind)


@triton.jit
def _rotate_and_cache(  # noqa: PLR0913 - a kernel
    q, k, v, cos, sin, q_norm, k_norm, keys, values, blocks, places, eps,
    NORMS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr,
    PADDED_HALF: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """A program: one head of one row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, PADDED_HALF)
    valid = half < SIZE // 2
    cos += row * (SIZE // 2)
    sin += row * (SIZE // 2)
    block = tl.load(blocks + row)
    place = tl.load(places + row)
    # The order of programs: query heads, key heads, value heads.
    if head < HEADS:
        source = q + (row * HEADS + head) * SIZE
        left, right = _normed_rotated(source, q_norm, cos, sin, eps, NORMS, SIZE, PADDED_HALF)
        tl.store(source + half, left, mask=valid)
        tl.store(source + SIZE // 2 + half, right, mask=valid)
    elif head < HEADS + KV_HEADS:
        kv = head - HEADS
        source = k + (row * KV_HEADS + kv) * SIZE
        left, right = _normed_rotated(source, k_norm, cos, sin, eps, NORMS, SIZE, PADDED_HALF)
        to = keys + (block * KV_HEADS + kv) * SIZE * SLOTS + place
        tl.store(to + half * SLOTS, left, mask=valid)
        tl.store(to + (SIZE // 2 + half) * SLOTS, right, mask=valid)
    else:
        kv = head - HEADS - KV_HEADS
        source = v + (row * KV_HEADS + kv) * SIZE
        to = values + ((block * KV_HEADS + kv) * SLOTS + place) * SIZE
        tl.store(to + half, tl.load(source + half, mask=valid), mask=valid)
        tl.store(to + SIZE // 2 + half, tl.load(source + SIZE // 2 + half, mask=valid), mask=valid)


@triton.jit
def _swiglu(gate, up, out, count, COLUMNS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    valid = at < count
    kind: tl.constexpr = out.dtype.element_ty
    wide = tl.load(gate + at, mask=valid, other=0.0).to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(kind).to(tl.float32)
    other = tl.load(up + at, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + at, (active * other).to(kind), mask=valid)
