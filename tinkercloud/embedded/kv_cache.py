"""Keys and values of the sequences being decoded: one slot per sequence, slots kept dense.

Axes: B active sequences (slots 0..B-1), Hkv key/value heads, G query heads per key/value head,
C capacity in tokens, Dh head size. Per layer the keys and the values are one (slots, Hkv, C, Dh)
tensor, so a step over all active slots is one batched product without a gather.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.embedded.contexts import SampleContext, Segment

TILE = 128
"""Capacity grows by whole tiles, and probabilities x values is summed tile by tile in order, so
that a sequence's result does not depend on how long its neighbours are."""


class SlotCache:
    """Owner of the slots. Slots 0..num_active-1 are in use; freeing moves the last one down."""

    def __init__(self, config: ArchitectureConfig, dtype: torch.dtype, device: torch.device):
        self._config = config
        self._dtype = dtype
        self._device = device
        self._slots = 0
        self._capacity = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.num_active = 0

    @property
    def bytes_per_token(self) -> int:
        """Of one sequence, all layers, keys and values."""
        c = self._config
        size = torch.empty(0, dtype=self._dtype).element_size()
        return 2 * c.num_layers * c.num_kv_heads * c.head_dim * size

    def bytes_for(self, num_slots: int, num_tokens: int) -> int:
        """What the cache would take with so many slots of so many tokens."""
        slots = max(self._slots, _grown(num_slots, 1))
        capacity = max(self._capacity, _grown(num_tokens, TILE))
        return slots * capacity * self.bytes_per_token

    def add(self, prompt: Sequence[tuple[Tensor, Tensor]], num_tokens: int) -> int:
        """Copy a prefilled prompt ((Hkv, P, Dh) keys, values per layer) into a new slot with room
        for at least `num_tokens`; returns the slot."""
        slot = self.num_active
        length = prompt[0][0].shape[1]
        self.reserve(slot + 1, max(num_tokens, length))
        for layer, (keys, values) in enumerate(prompt):
            self._keys[layer][slot, :, :length] = keys
            self._values[layer][slot, :, :length] = values
        self.num_active += 1
        return slot

    def free(self, slot: int) -> int:
        """Free a slot; returns the slot whose content moved into it (itself if it was the last)."""
        self.num_active -= 1
        last = self.num_active
        if slot != last:
            for cache in (*self._keys, *self._values):
                cache[slot] = cache[last]
        if self.num_active == 0:
            # Long sequences would otherwise hold their capacity for ever.
            self._slots = self._capacity = 0
            self._keys, self._values = [], []
        return last

    def append(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v (B, Hkv, Dh) at `positions` (B,) of slots 0..B-1."""
        slots = torch.arange(k.shape[0], device=k.device)
        self._keys[layer][slots, :, positions] = k
        self._values[layer][slots, :, positions] = v

    def view(self, layer: int, num_slots: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys, values (num_slots * Hkv, C', Dh): no copy; C' is num_tokens in whole tiles."""
        length = _grown(num_tokens, TILE)
        keys = self._keys[layer][:num_slots, :, :length].flatten(0, 1)
        return keys, self._values[layer][:num_slots, :, :length].flatten(0, 1)

    def reserve(self, num_slots: int, num_tokens: int) -> None:
        """Make room for so many slots of so many tokens; grows by half, so that copies are rare."""
        if num_slots <= self._slots and num_tokens <= self._capacity:
            return
        slots, capacity = self._slots, self._capacity
        if num_slots > slots:
            slots = max(num_slots, slots + slots // 2)
        if num_tokens > capacity:
            capacity = _grown(max(num_tokens, capacity + capacity // 2), TILE)
        shape = (slots, self._config.num_kv_heads, capacity, self._config.head_dim)
        for caches in (self._keys, self._values):
            for layer in range(self._config.num_layers):
                # Zeros, not garbage: masked positions are multiplied by probability 0, and 0 x NaN
                # is NaN.
                new = torch.zeros(shape, dtype=self._dtype, device=self._device)
                if layer < len(caches):
                    old = caches[layer][: self.num_active]
                    new[: self.num_active, :, : old.shape[2]] = old
                    caches[layer] = new
                else:
                    caches.append(new)
        self._slots, self._capacity = slots, capacity


def _grown(number: int, tile: int) -> int:
    return max(1, -(-number // tile)) * tile


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


class DecodeContext(SampleContext):
    """One new row per active slot; rows past `num_active` are padding."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        segments: Sequence[Segment],
        cache: SlotCache,
        positions: Tensor,
    ):
        """positions (B,): where each slot's new token stands."""
        super().__init__(weights, segments)
        self._cache = cache
        self._positions = positions
        self._longest = int(positions.max()) + 1

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_seqs = self._positions.shape[0]
        self._cache.append(layer, self._positions, k[:num_seqs], v[:num_seqs])
        keys, values = self._cache.view(layer, num_seqs, self._longest)
        out = torch.zeros_like(q)
        out[:num_seqs] = decode_attention(q[:num_seqs], keys, values, self._positions + 1)
        return out
