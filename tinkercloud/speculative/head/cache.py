"""A draft head row by row: its small KV cache, and the step that extends it.

A slot is one sequence. Rewinding changes a length, nothing else: rows beyond it are masked and
overwritten by the next ones.

Axes: S slots, C positions of a slot, B sequences of a step, N new rows of each, D hidden; Hkv and
Dh as in `head`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinkercloud.decoding.device_copy import to_device
from tinkercloud.speculative.head.head import Head, Params, mix, scores

LEAST_CAPACITY = 64


class HeadCache:
    """Keys and values (S, Hkv, C, Dh) of the head's layer; grows by doubling."""

    def __init__(self, head: Head, num_slots: int, capacity: int = LEAST_CAPACITY):
        target = head.config.target
        shape = (num_slots, target.num_kv_heads, capacity, target.head_dim)
        self.keys = torch.zeros(shape, device=head.device)
        self.values = torch.zeros(shape, device=head.device)
        self.lengths = [0] * num_slots

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def rewind(self, slot: int, length: int) -> None:
        """Raises ValueError for a length that the slot does not have."""
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"slot {slot} has {self.lengths[slot]} positions, not {length}")
        self.lengths[slot] = length

    def read(self, slots: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, Hkv, C, Dh) of the first `length` positions. Of slots that lie side
        by side, as that of one sample does, there is no copy."""
        rows: slice | list[int] = list(slots)
        if list(slots) == list(range(slots[0], slots[0] + len(slots))):
            rows = slice(slots[0], slots[0] + len(slots))
        return self.keys[rows, :, :length], self.values[rows, :, :length]

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Room for so many slots of so many positions."""
        slots, heads, positions, size = self.keys.shape
        if num_slots <= slots and capacity <= positions:
            return
        shape = (max(num_slots, slots), heads, _grown(positions, capacity), size)
        self.keys, self.values = (_copied(x, shape) for x in (self.keys, self.values))
        self.lengths += [0] * (shape[0] - slots)


@dataclass(frozen=True, slots=True)
class NewRows:
    """What each of B sequences gets: slots, its place in the cache; feature (B, N, D), tokens int64
    (B, N) and counts (B,): the first so many of the N rows are its own, the others padding."""

    slots: Sequence[int]
    feature: Tensor
    tokens: Tensor
    counts: Sequence[int]


@torch.no_grad()
def extend(head: Head, params: Params, cache: HeadCache, new: NewRows) -> Tensor:
    """Append rows to their slots; the block's outputs (B, N, D)."""
    num_new = new.tokens.shape[1]
    lengths = [cache.lengths[slot] for slot in new.slots]
    most = max(lengths) + num_new
    cache.reserve(0, most)
    slots, starts = to_device(torch.tensor([list(new.slots), lengths]), head.device)
    positions = starts[:, None] + torch.arange(num_new, device=head.device)
    projected = head.project(params, new.feature, new.tokens, positions)
    cache.keys[slots[:, None], :, positions] = projected.k.transpose(1, 2)
    cache.values[slots[:, None], :, positions] = projected.v.transpose(1, 2)
    later = torch.arange(most, device=head.device) > positions[:, :, None]
    keys, values = cache.read(new.slots, most)
    masked = scores(projected.q, keys).masked_fill(later[:, None, None], float("-inf"))
    shares = torch.softmax(masked, -1)
    for slot, length, count in zip(new.slots, lengths, new.counts, strict=True):
        cache.lengths[slot] = length + count
    return head.finish(params, new.feature, mix(shares, values))


def _grown(capacity: int, least: int) -> int:
    while capacity < least:
        capacity *= 2
    return capacity


def _copied(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    larger = x.new_zeros(shape)
    larger[: x.shape[0], :, : x.shape[2]] = x
    return larger
