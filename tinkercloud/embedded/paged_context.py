"""A ragged batch through torch: attention over keys and values that lie in blocks.

Axes: M rows, S sequences, Hq/Hkv query and key/value heads, G query heads per key/value head,
Dh head size, C tokens of a cache in whole tiles.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.architectures.llama import Llama
from tinkercloud.embedded.blocks import BLOCK_TOKENS, BlockPool, blocks_for
from tinkercloud.embedded.contexts import SampleContext, pad_rows, segments_of
from tinkercloud.embedded.versions import Version

TILE = 128
"""Probabilities x values is summed tile by tile in order, so that a sequence's result does not
depend on how long its neighbours are."""


class PagedContext(SampleContext):
    """Rows past the given ones are padding: they read and write nothing.

    positions, sequence (M,), tables (S, blocks): as in `runners.Batch`.
    """

    def __init__(
        self,
        versions: Sequence[tuple[Version, int]],
        pool: BlockPool,
        positions: NDArray[np.int32],
        sequence: NDArray[np.int32],
        tables: NDArray[np.int32],
    ):
        base = versions[0][0].base
        self._versions = [version for version, count in versions for _ in range(count)]
        num_rows = len(positions)
        self._versions += [self._versions[-1]] * (pad_rows(num_rows) - num_rows)
        entries = [version.entry for version in self._versions]
        super().__init__(versions[0][0].weights, segments_of(entries, base.device))
        self._pool, self._device, self._num_rows = pool, base.device, num_rows
        self._positions, self._sequence, self._tables = positions, sequence, tables
        blocks = tables[sequence, positions // BLOCK_TOKENS]
        self._blocks = self._tensor(blocks)
        self._slots = self._tensor(positions % BLOCK_TOKENS)
        starts = np.flatnonzero(np.diff(sequence, prepend=-1))
        counts = np.diff(starts, append=num_rows)
        self._single = starts[counts == 1]  # rows that are alone in their sequence
        self._chunks = [(int(s), int(n)) for s, n in zip(starts, counts, strict=True) if n > 1]

    def padded(self, tokens: NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens and positions, int64, in whole tiles of rows."""
        more = len(self._versions) - self._num_rows
        pair = (np.pad(tokens, (0, more)), np.pad(self._positions.astype(np.int64), (0, more)))
        return torch.from_numpy(pair[0]).to(device), torch.from_numpy(pair[1]).to(device)

    def unembed(self, architecture: Llama, hidden: Tensor, wanted: NDArray[np.int64]) -> Tensor:
        """hidden (M, D) -> logits (W, V) of the wanted rows."""
        rows = np.concatenate([wanted, np.repeat(wanted[:1], pad_rows(len(wanted)) - len(wanted))])
        entries = [self._versions[row].entry for row in rows.tolist()]
        context = SampleContext(self._base, segments_of(entries, self._device))
        return architecture.unembed(context, hidden[self._tensor(rows)])[: len(wanted)]

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        keys[self._blocks, :, :, self._slots] = k[: self._num_rows]
        values[self._blocks, :, self._slots] = v[: self._num_rows]
        out = torch.zeros_like(q)
        if len(self._single):
            rows = self._tensor(self._single)
            out[rows] = self._alone(q[rows], keys, values)
        for start, count in self._chunks:
            out[start : start + count] = self._chunk(q, keys, values, start, count)
        return out

    def _alone(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One query for each of B sequences, (B, Hq, Dh) -> (B, Hq, Dh)."""
        lengths = self._positions[self._single] + 1
        longest = blocks_for(-(-int(lengths.max()) // TILE) * TILE)
        tables = self._tables[self._sequence[self._single]]
        tables = np.pad(tables, ((0, 0), (0, max(0, longest - tables.shape[1]))))[:, :longest]
        held = self._tensor(tables)
        # (B, blocks, Hkv, Dh, slots) and (B, blocks, Hkv, slots, Dh) -> (B * Hkv, C, Dh)
        own_keys = keys[held].permute(0, 2, 1, 4, 3).flatten(2, 3).flatten(0, 1)
        own_values = values[held].permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)
        return decode_attention(q, own_keys, own_values, self._tensor(lengths))

    def _chunk(self, q: Tensor, keys: Tensor, values: Tensor, start: int, count: int) -> Tensor:
        """The last `count` positions of one sequence, (count, Hq, Dh)."""
        total = int(self._positions[start + count - 1]) + 1
        held = self._tensor(self._tables[self._sequence[start], : blocks_for(total)])
        own_keys = keys[held].permute(1, 0, 3, 2).flatten(1, 2)[:, :total]
        own_values = values[held].permute(1, 0, 2, 3).flatten(1, 2)[:, :total]
        return _chunk_attention(q[start : start + count], own_keys, own_values)

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)


def _chunk_attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q (n, Hq, Dh), the last n positions of keys (Hkv, P, Dh) -> (n, Hq, Dh)."""
    num_new, total, groups = q.shape[0], keys.shape[1], q.shape[1] // keys.shape[0]
    if groups > 1:
        keys = keys.repeat_interleave(groups, dim=0)
        values = values.repeat_interleave(groups, dim=0)
    mask = None
    if num_new != total:
        last_seen = torch.arange(total - num_new, total, device=q.device)[:, None]
        mask = torch.arange(total, device=q.device)[None] <= last_seen
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None
    )
    return out[0].transpose(0, 1)


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """One query per sequence against its cache.

    q (B, Hq, Dh), keys and values (B * Hkv, C, Dh) with C a multiple of TILE, lengths (B,) valid
    positions -> (B, Hq, Dh).
    """
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[0] // num_seqs
    groups = num_heads // num_kv_heads
    # Fewer than four query rows would take other matrix kernels for other batch sizes.
    padded = -(-groups // 4) * 4
    q = F.pad(q.view(num_seqs * num_kv_heads, groups, head_dim), (0, 0, 0, padded - groups))
    scores = torch.bmm(q, keys.transpose(1, 2)).float() * head_dim**-0.5
    unseen = torch.arange(keys.shape[1], device=q.device) >= lengths[:, None]
    scores = scores.view(num_seqs, num_kv_heads, padded, -1)
    scores = scores.masked_fill(unseen[:, None, None], float("-inf"))
    probs = torch.softmax(scores, -1).to(values.dtype).flatten(0, 1)
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for start in range(0, keys.shape[1], TILE):
        tile = slice(start, start + TILE)
        out += torch.bmm(probs[..., tile], values[:, tile])
    return out[:, :groups].to(q.dtype).reshape(num_seqs, num_heads, head_dim)
