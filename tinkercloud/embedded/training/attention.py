"""Causal attention inside each packed sequence, several sequences to a call, and its gradient.

PyTorch's takes sequences of similar length in one call: each is padded at its end to a bucket that
depends on its own length alone, so that its result does not depend on the others. No real row
attends to the padding (attention is causal), and no gradient comes from it. The compiled gradient
takes all sequences as they are. A row that several sequences share is computed in each of them; its
result is that of the first.

Axes: T packed rows, B sequences of a bucket, L their padded length, Hq/Hkv heads, Dh head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.architectures.blocks import Scoring
from tinkercloud.architectures.layers import attend_many
from tinkercloud.embedded.native.attention_gradient import Entries, attention_gradient
from tinkercloud.embedded.training.layout import first_owners


def bucket(length: int) -> int:
    """Padded rows of a sequence: at most an eighth more than it has, from 64 on."""
    step = 8 if length <= 64 else 16 if length <= 128 else 32 if length <= 512 else 64
    return -(-length // step) * step


@dataclass(frozen=True, slots=True)
class _Bucket:
    """rows: of the packing, (B * L,), or a slice where the sequences are whole and neighbours.
    owned: which of the B * L are neither padding nor another sequence's, or None for all."""

    num: int
    length: int
    rows: Tensor | slice
    owned: Tensor | None


@dataclass(frozen=True, slots=True)
class _BucketActivations:
    """What the gradient of one bucket needs: q, k and v, and autograd's result."""

    inputs: tuple[Tensor, Tensor, Tensor]
    out: Tensor

    def gradient(self, dout: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.out, self.inputs, dout)


AttentionActivations = list[_BucketActivations]


class PackedAttention:
    """Attention for sequences of rows of a packing, which together have all its rows.

    exact: no padding, so that in bfloat16 a sequence's results are rounded as if it were alone;
    only sequences of one length are one call.
    """

    def __init__(
        self,
        sequences: Sequence[NDArray[np.int64]],
        num_rows: int,
        device: torch.device,
        *,
        exact: bool = False,
    ):
        places = _Places(sequences, num_rows)
        self._buckets = [
            _gathered(size, members, sequences, places, device)
            for size, members in _members(sequences, exact=exact).items()
        ]
        self._sums = places.sums(device)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, *, keep: bool
    ) -> tuple[Tensor, AttentionActivations]:
        """q (T, Hq, Dh), k and v (T, Hkv, Dh) -> (T, Hq, Dh); the activations are empty
        unless `keep`."""
        kept: AttentionActivations = []
        whole: Tensor | None = None
        for at in self._buckets:
            bq, bk, bv = (_rows(x, at).detach().requires_grad_(keep) for x in (q, k, v))
            with torch.set_grad_enabled(keep):
                out = attend_many(bq, bk, bv, scoring)
            if keep:
                kept.append(_BucketActivations((bq, bk, bv), out))
            packed = _packed(out.detach())
            if len(self._buckets) == 1 and at.owned is None:
                return packed, kept
            whole = torch.empty_like(q) if whole is None else whole
            _put(whole, packed, at)
        assert whole is not None, "a pass has at least one sequence"
        return whole, kept

    def backward(self, kept: AttentionActivations, dout: Tensor, into: Sequence[Tensor]) -> None:
        """Write dq, dk and dv to the three tensors of `into`, shaped as q, k and v were."""
        grads: list[tuple[Tensor, ...]] = []
        for at, activations in zip(self._buckets, kept, strict=True):
            # A shared row's result was taken from its first sequence: only that one has a gradient.
            bucket_dout = _rows(dout, at, mask_others=True)
            grads.append(tuple(map(_packed, activations.gradient(bucket_dout))))
        for i, target in enumerate(into):
            if self._sums is not None:
                self._sums.put(target, torch.cat([of_bucket[i] for of_bucket in grads]))
                continue
            for at, of_bucket in zip(self._buckets, grads, strict=True):
                _put(target, of_bucket[i], at)


class CompiledAttentionGradient:
    """The gradient of attention for sequences of rows that the compiled pass has attended with.
    They may share rows and together have all of them."""

    def __init__(self, sequences: Sequence[NDArray[np.int64]], num_rows: int):
        # Threads end together where short ones come last.
        order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
        rows = np.concatenate([sequences[index] for index in order])
        lengths = [len(sequences[index]) for index in order]
        places = _Places(sequences, num_rows)
        owned = places.add(rows, np.ones(len(rows), np.bool_), np.repeat(order, lengths))
        self._sums = places.sums(torch.device("cpu"))
        self._entries = Entries(
            starts=np.cumsum([0, *lengths]),
            rows=rows,
            out_rows=rows if self._sums is None else np.arange(len(rows)),
            owned=None if self._sums is None else owned,
        )

    def write(
        self,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor],
        scoring: Scoring,
        into: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """As `attention_gradient`; of a shared row, the sum of its sequences' gradients."""
        if self._sums is None:
            attention_gradient(inputs, self._entries, scoring, into)
            return
        dq, dk, dv = (torch.empty(len(self._entries.rows), *x.shape[1:]) for x in into)
        attention_gradient(inputs, self._entries, scoring, (dq, dk, dv))
        for target, by_entry in zip(into, (dq, dk, dv), strict=True):
            self._sums.put(target, by_entry)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Row t of the packing is the sum of entries[starts[t] : starts[t + 1]] of all buckets' rows
    behind each other."""

    entries: Tensor
    starts: Tensor

    def put(self, target: Tensor, packed: Tensor) -> None:
        """target (T, H, Dh), packed (sum of B * L, H, Dh)."""
        summed = F.embedding_bag(self.entries, packed.flatten(1), self.starts, mode="sum")
        target.copy_(summed.view_as(target))


class _Places:
    """Which entries of the buckets are a row's, collected bucket by bucket."""

    def __init__(self, sequences: Sequence[NDArray[np.int64]], num_rows: int):
        self._owner = first_owners(sequences, num_rows)  # of all buckets
        # One element for each entry that is no padding.
        self._rows: list[NDArray[np.int64]] = []
        self._sequences: list[NDArray[np.int64]] = []
        self._entries: list[NDArray[np.int64]] = []
        self._num_entries = 0

    def add(
        self, rows: NDArray[np.int64], real: NDArray[np.bool_], sequence: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Entries (B * L,) of the next bucket; which of them own their row."""
        entries = np.flatnonzero(real)
        self._rows.append(rows[entries])
        self._sequences.append(sequence[entries])
        self._entries.append(entries + self._num_entries)
        self._num_entries += len(rows)
        return real & (self._owner[rows] == sequence)

    def sums(self, device: torch.device) -> _Sums | None:
        """None where every row has one entry."""
        rows, entries = np.concatenate(self._rows), np.concatenate(self._entries)
        if len(rows) == len(self._owner):
            return None
        # By sequence, not by bucket: the order of a sum must not depend on the other sequences.
        order = np.lexsort((np.concatenate(self._sequences), rows))
        starts = np.searchsorted(rows[order], np.arange(len(self._owner)))
        return _Sums(
            torch.from_numpy(entries[order]).to(device), torch.from_numpy(starts).to(device)
        )


def _members(sequences: Sequence[NDArray[np.int64]], *, exact: bool) -> dict[int, list[int]]:
    """Padded length -> its sequences."""
    members: dict[int, list[int]] = {}
    for index, rows in enumerate(sequences):
        length = len(rows) if exact else bucket(len(rows))
        members.setdefault(length, []).append(index)
    return members


def _gathered(
    size: int,
    members: Sequence[int],
    sequences: Sequence[NDArray[np.int64]],
    places: _Places,
    device: torch.device,
) -> _Bucket:
    chosen = [sequences[index] for index in members]
    # Padding repeats the sequence's first row: any finite row will do.
    rows = np.concatenate([np.pad(m[1:], (1, size - len(m)), constant_values=m[0]) for m in chosen])
    real = np.concatenate([np.arange(size) < len(m) for m in chosen])
    owned = places.add(rows, real, np.repeat(members, size))
    if owned.all() and bool((np.diff(rows) == 1).all()):
        return _Bucket(len(members), size, slice(int(rows[0]), int(rows[-1]) + 1), None)
    mask = None if owned.all() else torch.from_numpy(owned).to(device)
    return _Bucket(len(members), size, torch.from_numpy(rows).to(device), mask)


def _rows(x: Tensor, at: _Bucket, *, mask_others: bool = False) -> Tensor:
    """x (T, H, Dh) -> (B, H, L, Dh); mask_others: zeros in entries that do not own their row."""
    rows = x[at.rows]
    if mask_others and at.owned is not None:
        rows = rows.masked_fill(~at.owned[:, None, None], 0.0)
    return rows.view(at.num, at.length, *x.shape[1:]).transpose(1, 2)


def _packed(x: Tensor) -> Tensor:
    """(B, H, L, Dh) -> (B * L, H, Dh)."""
    return x.transpose(1, 2).flatten(0, 1)


def _put(target: Tensor, packed: Tensor, at: _Bucket) -> None:
    if at.owned is None:
        target[at.rows] = packed
    else:
        assert isinstance(at.rows, Tensor)
        target[at.rows[at.owned]] = packed[at.owned]
