"""One query per sequence against its keys and values in blocks, the plain form.

Axes: B sequences, Hq/Hkv query and key/value heads, Dh head size, W blocks of the widest table,
C tokens of a cache in whole tiles.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkercloud.architectures.blocks import Scoring
from tinkercloud.architectures.layers import capped

TILE = 128
"""Probabilities x values is summed tile by tile in order, so that a sequence's result does not
depend on how long its neighbours are."""

PagedAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""q (B, Hq, Dh), keys (blocks, Hkv, Dh, slots), values (blocks, Hkv, slots, Dh), tables (B, W)
and lengths (B,) int32 or int64, lengths at least 1 -> (B, Hq, Dh); scores have the scale
Dh ** -0.5 alone."""


def scored_by(attend: PagedAttention, scoring: Scoring, head_dim: int) -> PagedAttention:
    """`attend` where it scores so; else the plain form, with this scoring."""
    return attend if scoring == Scoring(head_dim**-0.5) else partial(_scored, scoring=scoring)


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor
) -> Tensor:
    """`PagedAttention` through torch; W blocks are whole tiles. Shapes alone decide what runs."""
    return _scored(q, keys, values, tables, lengths, scoring=Scoring(q.shape[2] ** -0.5))


def _scored(q: Tensor, *kept: Tensor, scoring: Scoring) -> Tensor:
    keys, values, tables, lengths = kept
    # (B, W, Hkv, Dh, slots) and (B, W, Hkv, slots, Dh) -> (B * Hkv, C, Dh)
    seq_keys = keys[tables].permute(0, 2, 1, 4, 3).flatten(2, 3)
    seq_values = values[tables].permute(0, 2, 1, 3, 4).flatten(2, 3)
    positions = torch.arange(seq_values.shape[2], device=q.device)
    unseen = positions >= lengths[:, None]
    # Another sequence's values may lie there, or NaN, and probability 0 x NaN is NaN.
    seq_values = seq_values.masked_fill(unseen[:, None, :, None], 0)
    if scoring.window:
        unseen |= positions < lengths[:, None] - scoring.window
    return decode_attention(q, seq_keys.flatten(0, 1), seq_values.flatten(0, 1), unseen, scoring)


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, unseen: Tensor, scoring: Scoring
) -> Tensor:
    """One query per sequence against its cache.

    q (B, Hq, Dh), keys and values (B * Hkv, C, Dh) with C a multiple of TILE, unseen (B, C): True
    where nothing may be read -> (B, Hq, Dh).
    """
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[0] // num_seqs
    groups = num_heads // num_kv_heads
    # With fewer than four query rows a BLAS chooses its kernel by the batch size.
    padded = -(-groups // 4) * 4
    q = q.reshape(num_seqs * num_kv_heads, groups, head_dim)
    q = F.pad(q, (0, 0, 0, padded - groups))
    scores = torch.bmm(q, keys.transpose(1, 2)).float() * scoring.scale
    scores = capped(scores, scoring.cap).view(num_seqs, num_kv_heads, padded, -1)
    scores = scores.masked_fill(unseen[:, None, None], float("-inf"))
    probs = torch.softmax(scores, -1).to(values.dtype).flatten(0, 1)
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for start in range(0, keys.shape[1], TILE):
        tile = slice(start, start + TILE)
        out += torch.bmm(probs[..., tile], values[:, tile])
    return out[:, :groups].to(q.dtype).reshape(num_seqs, num_heads, head_dim)
