"""Causal attention inside each packed sequence, several sequences to a call, and its gradient.

Sequences of similar length are one call: each is padded at its end to a bucket that depends on its
own length alone, so that its result does not depend on its company. What stands in the padding is
seen by no real row (attention is causal), and no gradient comes from it.

Axes: T packed rows, B sequences of a bucket, L their padded length, Hq/Hkv heads, Dh head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def bucket(length: int) -> int:
    """Padded rows of a sequence: at most an eighth more than it has, from 64 on."""
    step = 8 if length <= 64 else 16 if length <= 128 else 32 if length <= 512 else 64
    return -(-length // step) * step


@dataclass(frozen=True, slots=True)
class _Bucket:
    """rows: of the packing, (B * L,), or a slice where the sequences are whole and neighbours.
    real: which of the B * L are no padding, or None for all."""

    num: int
    length: int
    rows: Tensor | slice
    real: Tensor | None


class _Kept:
    """One bucket's share of a forward pass with what its gradient needs."""

    __slots__ = ("inputs", "out")

    def __init__(self, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor):
        self.inputs, self.out = inputs, out


Kept = list[_Kept]


class PackedAttention:
    """Attention for sequences of these lengths, in this order."""

    def __init__(self, lengths: Sequence[int], device: torch.device):
        self._buckets = [
            _gathered(size, members, device) for size, members in _members(lengths).items()
        ]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, keep: bool) -> tuple[Tensor, Kept]:
        """q (T, Hq, Dh), k and v (T, Hkv, Dh) -> (T, Hq, Dh); Kept is empty unless `keep`."""
        kept: Kept = []
        whole: Tensor | None = None
        for at in self._buckets:
            own_q, own_k, own_v = (_rows(x, at).detach().requires_grad_(keep) for x in (q, k, v))
            with torch.set_grad_enabled(keep):
                out = F.scaled_dot_product_attention(
                    own_q, own_k, own_v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
                )
            if keep:
                kept.append(_Kept((own_q, own_k, own_v), out))
            packed = out.detach().transpose(1, 2).reshape(-1, *q.shape[1:])
            if len(self._buckets) == 1 and at.real is None:
                return packed, kept
            whole = torch.empty_like(q) if whole is None else whole
            _put(whole, packed, at)
        assert whole is not None, "a pass has at least one sequence"
        return whole, kept

    def backward(self, kept: Kept, dout: Tensor, into: Sequence[Tensor]) -> None:
        """Write dq, dk and dv to the three tensors of `into`, shaped as q, k and v were."""
        for at, one in zip(self._buckets, kept, strict=True):
            given = _rows(dout, at)
            if at.real is not None:
                given = _rows(dout, at, silent_padding=True)
            grads = torch.autograd.grad(one.out, one.inputs, given)
            for target, grad in zip(into, grads, strict=True):
                packed = grad.transpose(1, 2).reshape(-1, *target.shape[1:])
                _put(target, packed, at)


def _members(lengths: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """bucket -> (first row, length) of its sequences."""
    members: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for length in lengths:
        members.setdefault(bucket(length), []).append((start, length))
        start += length
    return members


def _gathered(size: int, members: list[tuple[int, int]], device: torch.device) -> _Bucket:
    starts = torch.tensor([start for start, _ in members])
    lengths = torch.tensor([length for _, length in members])
    if bool((lengths == size).all()) and bool((starts.diff() == size).all()):
        first = int(starts[0])
        return _Bucket(len(members), size, slice(first, first + size * len(members)), None)
    offsets = torch.arange(size)
    real = offsets < lengths[:, None]
    # Padding repeats the sequence's first row: any finite row will do.
    rows = starts[:, None] + torch.where(real, offsets, 0)
    whole = bool(real.all())
    return _Bucket(
        len(members), size, rows.flatten().to(device), None if whole else real.flatten().to(device)
    )


def _rows(x: Tensor, at: _Bucket, *, silent_padding: bool = False) -> Tensor:
    """x (T, H, Dh) -> (B, H, L, Dh), zeros in the padding where it must be silent."""
    rows = x[at.rows]
    if silent_padding and at.real is not None:
        rows = rows.masked_fill(~at.real[:, None, None], 0.0)
    return rows.view(at.num, at.length, *x.shape[1:]).transpose(1, 2)


def _put(target: Tensor, packed: Tensor, at: _Bucket) -> None:
    if at.real is None:
        target[at.rows] = packed
    else:
        assert isinstance(at.rows, Tensor)
        target[at.rows[at.real]] = packed[at.real]
