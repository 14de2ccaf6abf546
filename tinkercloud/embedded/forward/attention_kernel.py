# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
"""One query per sequence against its keys and values in blocks, as Triton kernels.

All query heads of a key/value head read it together; softmax is computed online (Milakov &
Gimelshein 2018); for small batches the context is split into parts that run in parallel and are
combined after, as in flash decoding. What is launched depends on shapes alone, so that a CUDA graph
can hold it.

Axes: B sequences, Hq/Hkv heads, G = Hq / Hkv, Dh head size, W blocks of the widest table, P parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 64  # that a program reads at a time
_PROGRAMS = 512  # about as many as keep a large GPU busy
_MIN_SIZE = 16  # rows and columns of a matrix product


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor
) -> Tensor:
    """A `paged_attention.PagedAttention`."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, slots = keys.shape[1], keys.shape[3]
    q, tables = q.contiguous(), tables.contiguous()
    out = torch.empty_like(q)
    parts = num_parts(num_seqs, num_kv_heads, tables.shape[1] * slots)
    shape = (num_seqs, num_heads, parts)
    mixed = torch.empty((*shape, head_dim) if parts > 1 else 0, device=q.device)
    peaks = torch.empty(shape if parts > 1 else 0, device=q.device)
    sums = torch.empty_like(peaks)
    sizes = {
        "GROUPS": num_heads // num_kv_heads,
        "SIZE": head_dim,
        "PADDED_SIZE": max(_MIN_SIZE, triton.next_power_of_2(head_dim)),
        "PARTS": parts,
    }
    _attend[(num_seqs, num_kv_heads, parts)](
        *(q, keys, values, tables, lengths, out, mixed, peaks, sums),
        tables.shape[1],
        head_dim**-0.5,
        SLOTS=slots,
        TOKENS=_TOKENS,
        PADDED_GROUPS=max(_MIN_SIZE, triton.next_power_of_2(sizes["GROUPS"])),
        **sizes,
    )
    if parts > 1:
        del sizes["GROUPS"]
        padded_parts = triton.next_power_of_2(parts)
        _combine[(num_seqs, num_heads)](mixed, peaks, sums, out, PADDED_PARTS=padded_parts, **sizes)
    return out


def num_parts(num_seqs: int, num_kv_heads: int, num_tokens: int) -> int:
    """How many parts a context is split into; num_tokens: the most that it may have."""
    fills_gpu = _PROGRAMS // (num_seqs * num_kv_heads)
    return max(1, min(fills_gpu, num_tokens // _TOKENS, 64))


@triton.jit
def _attend(  # noqa: PLR0913 - a kernel
    q, keys, values, tables, lengths, out, mixed, peaks, sums, width, scale,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, PARTS: tl.constexpr,
    SLOTS: tl.constexpr, TOKENS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
):  # fmt: skip
    """A program: one sequence, one key/value head, one part of the context."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    length = tl.load(lengths + row).to(tl.int32)
    each = tl.cdiv(tl.cdiv(length, TOKENS), PARTS) * TOKENS
    first = part * each
    last = tl.minimum(first + each, length)
    group = tl.arange(0, PADDED_GROUPS)
    size = tl.arange(0, PADDED_SIZE)
    token = tl.arange(0, TOKENS)
    head_rows = (row * num_kv_heads + head) * GROUPS + group
    real = (group < GROUPS)[:, None] & (size < SIZE)[None, :]
    query = tl.load(q + head_rows[:, None] * SIZE + size[None, :], mask=real, other=0.0)
    peak = tl.full([PADDED_GROUPS], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_GROUPS], tl.float32)
    weighted = tl.zeros([PADDED_GROUPS, PADDED_SIZE], tl.float32)
    for start in range(first, last, TOKENS):
        valid = start + token < last
        # A block is there or not as a whole, and `start` is a block's first token: so the compiler
        # sees that a block's slots lie side by side, and reads more than one at a time.
        index = start // SLOTS + token // SLOTS
        there = index * SLOTS < last
        block = tl.load(tables + row * width + index, mask=there, other=0).to(tl.int64)
        base = (block * num_kv_heads + head) * SIZE * SLOTS
        slot = token % SLOTS
        key = tl.load(  # whatever is in slots past the last: their scores are left out
            keys + base[None, :] + size[:, None] * SLOTS + slot[None, :],
            mask=(size < SIZE)[:, None],
            other=0.0,
        )
        value = tl.load(  # on its way while the scores are computed
            values + base[:, None] + slot[:, None] * SIZE + size[None, :],
            mask=valid[:, None] & (size < SIZE)[None, :],
            other=0.0,
        )
        score = tl.dot(query, key, input_precision="ieee") * scale
        score = tl.where(valid[None, :], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        prob = tl.exp(score - higher[:, None])
        rescale = tl.exp(peak - higher)
        added = tl.dot(prob.to(value.dtype), value, input_precision="ieee")
        weighted = weighted * rescale[:, None] + added
        total = total * rescale + tl.sum(prob, 1)
        peak = higher
    if PARTS == 1:
        result = (weighted / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + head_rows[:, None] * SIZE + size[None, :], result, mask=real)
    else:
        at = head_rows * PARTS + part
        tl.store(peaks + at, peak, mask=group < GROUPS)
        tl.store(sums + at, total, mask=group < GROUPS)
        tl.store(mixed + at[:, None] * SIZE + size[None, :], weighted, mask=real)


@triton.jit
def _combine(  # noqa: PLR0913 - a kernel
    mixed, peaks, sums, out,
    SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr,
):  # fmt: skip
    """A program: one sequence, one query head. The first part is never empty."""
    head_rows = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    part = tl.arange(0, PADDED_PARTS)
    size = tl.arange(0, PADDED_SIZE)
    valid = part < PARTS
    at = head_rows * PARTS + part
    peak = tl.load(peaks + at, mask=valid, other=float("-inf"))
    factor = tl.exp(peak - tl.max(peak, 0))
    total = tl.sum(tl.load(sums + at, mask=valid, other=0.0) * factor, 0)
    partial = tl.load(
        mixed + at[:, None] * SIZE + size[None, :],
        mask=valid[:, None] & (size < SIZE)[None, :],
        other=0.0,
    )
    result = tl.sum(partial * factor[:, None], 0) / total
    tl.store(out + head_rows * SIZE + size, result.to(out.dtype.element_ty), mask=size < SIZE)
