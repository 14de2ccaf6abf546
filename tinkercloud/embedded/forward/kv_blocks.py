"""Keys and values in blocks of equal size, shared by sequences with the same prefix.

A full block can be found by the digest of what it holds: its version's id, the salt of those who
share it, and all tokens up to its end. The block that was computed last behind such a prefix, full
or begun, can be found by the prefix's digest, for the tokens that it begins with. Blocks without
holders keep their content until they are needed, the least recently used first.

Axes: Hkv key/value heads, Dh head size.
"""

import math
import mmap
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.embedded.native.packed import num_key_errors

BLOCK_TOKENS = 16
LINE_BYTES = 64  # of a processor's cache
Digest = bytes


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


def digest_before(version_id: str, salt: str) -> Digest:
    """Of the first block."""
    return f"{version_id}\0{salt}".encode()


def block_digests(
    version_id: str, salt: str, tokens: Sequence[int], first: Sequence[Digest] = ()
) -> list[Digest]:
    """The digest of every full block of `tokens`, different for each salt; `first`: those of the
    first blocks, which are not computed again."""
    digests = list(first)
    before = digests[-1] if digests else digest_before(version_id, salt)
    for start in range(len(digests) * BLOCK_TOKENS, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = np.asarray(tokens[start : start + BLOCK_TOKENS], np.int64).tobytes()
        before = blake2b(before + block, digest_size=16).digest()
        digests.append(before)
    return digests


@dataclass(frozen=True, slots=True)
class _Beginning:
    """The first tokens of a block, which nobody writes any more."""

    block: int
    version_id: str
    tokens: tuple[int, ...]


class KVLayout(Enum):
    """How keys and values lie in a block; a runner says which it reads.

    PLAIN: keys (blocks, Hkv, Dh, BLOCK_TOKENS), values (blocks, Hkv, BLOCK_TOKENS, Dh). PAIRED, for
    processors that add products of bfloat16 by pairs: keys (blocks, Hkv, (Dh + E) / 2,
    BLOCK_TOKENS, 2), pairs of dimensions and behind these of the rounding errors of E of them
    (`num_key_errors`), and values (blocks, Hkv, BLOCK_TOKENS / 2, Dh, 2), pairs of tokens.
    """

    PLAIN = "plain"
    PAIRED = "paired"

    def shapes(self, heads: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a block's keys and of its values."""
        if self is KVLayout.PLAIN:
            return (heads, size, BLOCK_TOKENS), (heads, BLOCK_TOKENS, size)
        with_errors = size + num_key_errors(size, torch.bfloat16)
        return (heads, with_errors // 2, BLOCK_TOKENS, 2), (heads, BLOCK_TOKENS // 2, size, 2)


def kv_layout_of(dtype: torch.dtype) -> KVLayout:
    """What the compiled pass reads."""
    return KVLayout.PAIRED if dtype == torch.bfloat16 else KVLayout.PLAIN


class BlockPool:
    """keys and values of all blocks by layer, as `layout` has them.

    Blocks count their holders: who allocates, finds or acquires a block frees it once. On a CPU a
    block takes memory when it is first written.
    """

    def __init__(
        self,
        config: ArchitectureConfig,
        dtype: torch.dtype,
        device: torch.device,
        num_blocks: int,
        layout: KVLayout = KVLayout.PLAIN,
    ):
        self.layout = layout
        keys, values = layout.shapes(config.num_kv_heads, config.head_dim)
        shapes = [(num_blocks, *keys), (num_blocks, *values)] * config.num_layers
        # Zeros, not garbage: masked positions are multiplied by probability 0, and 0 x NaN is NaN.
        if device.type == "cpu":
            tensors = _zeros(shapes, dtype)
        else:
            tensors = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.keys, self.values = tensors[::2], tensors[1::2]
        self._unused = list(range(num_blocks))[::-1]  # the last is allocated first
        self._num_holders = [0] * num_blocks
        self._digests: dict[int, tuple[str, Digest]] = {}  # by block
        self._blocks: dict[Digest, int] = {}
        self._beginnings: dict[Digest, _Beginning] = {}  # by the digest before them
        self._beginning_digests: dict[int, Digest] = {}  # by block
        # Registered, without holders, and since when.
        self._cached: OrderedDict[int, float] = OrderedDict()

    @staticmethod
    def bytes_per_block(
        config: ArchitectureConfig, dtype: torch.dtype, layout: KVLayout = KVLayout.PLAIN
    ) -> int:
        numbers = sum(map(math.prod, layout.shapes(config.num_kv_heads, config.head_dim)))
        return config.num_layers * numbers * dtype.itemsize

    @property
    def num_blocks(self) -> int:
        return len(self._num_holders)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._unused) + len(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """That many blocks to write, each with one holder; None when there are not so many."""
        if count > self.num_available:
            return None
        blocks = [self._unused.pop() if self._unused else self._evict() for _ in range(count)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def extend(self, blocks: list[int], num_tokens: int) -> bool:
        """Append to `blocks` until they hold that many tokens; False, appending nothing, when there
        are not enough."""
        num_missing = blocks_for(num_tokens) - len(blocks)
        if num_missing > 0:
            added = self.allocate(num_missing)
            if added is None:
                return False
            blocks += added
        return True

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more holder of each."""
        for block in blocks:
            self._num_holders[block] += 1
            self._cached.pop(block, None)

    def free(self, blocks: Sequence[int]) -> None:
        """One holder less of each. In reverse, so that the ends of sequences are evicted before
        their beginnings: a prefix is found block by block from its start."""
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            assert self._num_holders[block] >= 0, "freed more often than acquired"
            if not self._num_holders[block]:
                if block in self._digests or block in self._beginning_digests:
                    self._cached[block] = time.monotonic()
                else:
                    self._unused.append(block)

    def find(self, digests: Sequence[Digest]) -> list[int]:
        """The blocks of the longest registered prefix, acquired."""
        blocks = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            blocks.append(block)
        self.acquire(blocks)
        return blocks

    def register(self, block: int, version_id: str, digest: Digest) -> None:
        """From now on the full block can be found; where another block has its content, that one
        is found."""
        if digest not in self._blocks and block not in self._digests:
            self._blocks[digest] = block
            self._digests[block] = (version_id, digest)

    def register_beginning(
        self, block: int, version_id: str, before: Digest, tokens: Sequence[int]
    ) -> None:
        """From now on these first tokens of a block, which nobody writes any more, can be found by
        the digest before it, until another block's are registered there."""
        self._forget_beginning(before)
        if block in self._beginning_digests:
            self._forget_beginning(self._beginning_digests[block])
        self._beginnings[before] = _Beginning(block, version_id, tuple(tokens))
        self._beginning_digests[block] = before

    def find_beginning(self, before: Digest, tokens: Sequence[int]) -> tuple[int, int] | None:
        """A block, acquired, and with how many of `tokens` it begins, at least one. Who writes
        behind these has to copy it."""
        beginning = self._beginnings.get(before)
        if beginning is None:
            return None
        pairs = enumerate(zip(beginning.tokens, tokens, strict=False))
        shorter = min(len(beginning.tokens), len(tokens))
        num_equal = next((i for i, (own, other) in pairs if own != other), shorter)
        if not num_equal:
            return None
        self.acquire([beginning.block])
        return beginning.block, num_equal

    def forget(self, version_id: str) -> None:
        """No block of a version is found any more."""
        for before in [
            d for d, beginning in self._beginnings.items() if beginning.version_id == version_id
        ]:
            self._forget_beginning(before)
        for block in [b for b, (version, _) in self._digests.items() if version == version_id]:
            del self._blocks[self._digests.pop(block)[1]]
            self._discard_unfound(block)

    def forget_unused(self, before_s: float) -> None:
        """What has had no holder since before that time (`time.monotonic`) is not found any
        more."""
        while self._cached and next(iter(self._cached.values())) < before_s:
            self._unused.append(self._evict())

    def copy(self, source: int, target: int) -> None:
        """The content of a block, all layers."""
        for tensor in (*self.keys, *self.values):
            tensor[target] = tensor[source]

    def write(self, layer: int, blocks: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Keys and values (M, Hkv, Dh) of M tokens, each into its slot (M,) of its block (M,), in a
        plain pool."""
        assert self.layout is KVLayout.PLAIN
        self.keys[layer][blocks, :, :, slots] = k
        self.values[layer][blocks, :, slots] = v

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (Hkv, P, Dh) of the P tokens of these blocks, in order; a plain pool."""
        assert self.layout is KVLayout.PLAIN
        keys, values = self.keys[layer][blocks], self.values[layer][blocks]
        return keys.permute(1, 0, 3, 2).flatten(1, 2), values.permute(1, 0, 2, 3).flatten(1, 2)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        if block in self._digests:
            del self._blocks[self._digests.pop(block)[1]]
        if block in self._beginning_digests:
            del self._beginnings[self._beginning_digests.pop(block)]
        return block

    def _forget_beginning(self, before: Digest) -> None:
        beginning = self._beginnings.pop(before, None)
        if beginning is not None:
            del self._beginning_digests[beginning.block]
            self._discard_unfound(beginning.block)

    def _discard_unfound(self, block: int) -> None:
        """It is unused if it has no holder and cannot be found."""
        is_found = block in self._digests or block in self._beginning_digests
        if block in self._cached and not is_found:
            del self._cached[block]
            self._unused.append(block)


def _zeros(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Tensors in one piece of memory of their own: pages that are never written take none, and it
    goes back to the system with the last of the tensors. The allocator would keep what it has once
    given, and write zeros to all of it when it gives it again."""
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    # Each begins with a cache line, which every vector would else cross.
    padded = [-(-size // LINE_BYTES) * LINE_BYTES for size in sizes]
    area = mmap.mmap(-1, max(sum(padded), 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(area, dtype=torch.uint8)[: sum(padded)]
    return [
        region[:size].view(dtype).view(shape)
        for region, size, shape in zip(whole.split(padded), sizes, shapes, strict=True)
    ]
