"""A ragged batch through torch: attention over keys and values that lie in blocks.

Axes: M rows, S sequences, Hq/Hkv query and key/value heads, Dh head size.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.architectures.blocks import Scoring
from tinkercloud.architectures.layers import attend
from tinkercloud.architectures.llama import Llama
from tinkercloud.embedded.forward.batch import Batch
from tinkercloud.embedded.forward.contexts import SampleContext, segments_of
from tinkercloud.embedded.forward.kernel_choice import attention_for
from tinkercloud.embedded.forward.kv_blocks import BLOCK_TOKENS, BlockPool, blocks_for
from tinkercloud.embedded.forward.paged_attention import TILE, scored_by
from tinkercloud.embedded.forward.row_invariance import Product, pad_rows
from tinkercloud.embedded.model.uploads import uploaded


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several rows of one sequence: `rows` of the batch, the blocks (blocks,) of the `total` tokens
    up to the last of them, and which of these each row sees, bool (n, total); None: those before
    it, and all rows are there."""

    rows: slice
    blocks: Tensor
    total: int
    seen: Tensor | None


class PagedContext(SampleContext):
    """Rows past those of the batch are padding: they read and write nothing.

    All indices are made and brought to the device once, here, not in every layer; nothing here or
    in a layer waits for the device, so that other streams' work can be queued while the pass runs.
    """

    def __init__(self, batch: Batch, pool: BlockPool, product: Product = F.linear):
        base, positions = batch.base, batch.positions
        sequence, tables = batch.sequence, batch.tables
        self._versions = [version for version, count in batch.versions for _ in range(count)]
        num_rows = len(positions)
        self._versions += [self._versions[-1]] * (pad_rows(num_rows) - num_rows)
        entries = [version.entry for version in self._versions]
        super().__init__(self._versions[0].weights, segments_of(entries, base.device), product)
        self._batch = batch
        self._pool, self._device, self._num_rows = pool, base.device, num_rows
        self._positions = positions
        blocks = tables[sequence, positions // BLOCK_TOKENS]
        self._blocks, self._slots = self._tensors(blocks, positions % BLOCK_TOKENS)
        starts = np.flatnonzero(np.diff(sequence, prepend=-1))
        counts = np.diff(starts, append=num_rows)
        self._attend = attention_for(base.device, base.dtype)
        single = starts[counts == 1]  # rows that are alone in their sequence
        self._single = self._alone(single, tables[sequence[single]]) if len(single) else None
        self._chunks = [
            self._chunk(int(start), int(count), tables[sequence[start]])
            for start, count in zip(starts, counts, strict=True)
            if count > 1
        ]

    def padded_inputs(self) -> tuple[Tensor, Tensor]:
        """Tokens and positions, int64, in whole tiles of rows."""
        padding = (0, len(self._versions) - self._num_rows)
        tokens, positions = self._tensors(
            np.pad(self._batch.tokens, padding), np.pad(self._positions, padding)
        )
        return tokens, positions

    def unembed(self, architecture: Llama, hidden: Tensor) -> Tensor:
        """hidden (M, D) -> logits (W, V) of the batch's logit rows."""
        logit_rows = self._batch.logit_rows
        num_rows = len(logit_rows)
        padding = np.repeat(logit_rows[:1], pad_rows(num_rows) - num_rows)
        rows = np.concatenate([logit_rows, padding])
        entries = [self._versions[row].entry for row in rows.tolist()]
        context = SampleContext(self._base, segments_of(entries, self._device), self._product)
        (held,) = self._tensors(rows)
        return architecture.unembed(context, hidden[held])[:num_rows]

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        num_rows = self._num_rows
        self._pool.write(layer, self._blocks, self._slots, k[:num_rows], v[:num_rows])
        out = torch.zeros_like(q)
        if self._single is not None:
            rows, tables, lengths = self._single
            keys, values = self._pool.keys[layer], self._pool.values[layer]
            scored = scored_by(self._attend, scoring, q.shape[2])
            out[rows] = scored(q[rows], keys, values, tables, lengths)
        for chunk in self._chunks:
            keys, values = (x[:, : chunk.total] for x in self._pool.read(layer, chunk.blocks))
            out[chunk.rows] = _chunk_attention(q[chunk.rows], keys, values, chunk.seen, scoring)
        return out

    def _alone(
        self, rows: NDArray[np.int64], tables: NDArray[np.int32]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For one query of each of B sequences: rows (B,), tables (B, W) in whole tiles of
        attention, lengths (B,)."""
        lengths = self._positions[rows] + 1
        longest = blocks_for(-(-int(lengths.max()) // TILE) * TILE)
        tables = np.pad(tables, ((0, 0), (0, max(0, longest - tables.shape[1]))))[:, :longest]
        at, held, valid = self._tensors(rows, tables, lengths)
        return at, held, valid

    def _chunk(self, start: int, count: int, table: NDArray[np.int32]) -> _Chunk:
        total = int(self._positions[start + count - 1]) + 1
        (held,) = self._tensors(table[: blocks_for(total)])
        seen = None
        if count != total:
            last_seen = torch.arange(total - count, total, device=self._device)[:, None]
            seen = torch.arange(total, device=self._device)[None] <= last_seen
        return _Chunk(slice(start, start + count), held, total, seen)

    def _tensors(self, *arrays: NDArray[np.generic]) -> list[Tensor]:
        return [uploaded(each.astype(np.int64), self._device) for each in arrays]


def _chunk_attention(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scoring: Scoring
) -> Tensor:
    """q (n, Hq, Dh), the last n positions of keys (Hkv, P, Dh); seen: as in `_Chunk`
    -> (n, Hq, Dh)."""
    if not scoring.is_scaled_only:
        first = keys.shape[1] - len(q)
        return attend(q, keys.transpose(0, 1), values.transpose(0, 1), scoring, first)
    groups = q.shape[1] // keys.shape[0]
    if groups > 1:
        keys = keys.repeat_interleave(groups, dim=0)
        values = values.repeat_interleave(groups, dim=0)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=seen, is_causal=seen is None,
        scale=scoring.scale,
    )  # fmt: skip
    return out[0].transpose(0, 1)
