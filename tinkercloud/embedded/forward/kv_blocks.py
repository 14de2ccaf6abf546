"""Keys and values in blocks of equal size, shared by whoever has the same beginning.

A block that is full can be found again by what it holds: its version's id and all tokens up to its
end. Blocks that nobody holds stay until their room is needed, the longest unused first.

Axes: Hkv key/value heads, Dh head size.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from tinkercloud.architectures.config import ArchitectureConfig

BLOCK_TOKENS = 16
Digest = bytes


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


def chain(version_id: str, tokens: Sequence[int], known: Sequence[Digest] = ()) -> list[Digest]:
    """The digest of every full block of `tokens`; `known` are those of the first ones."""
    digests = list(known)
    before = digests[-1] if digests else version_id.encode()
    for start in range(len(digests) * BLOCK_TOKENS, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = np.asarray(tokens[start : start + BLOCK_TOKENS], np.int64).tobytes()
        before = blake2b(before + block, digest_size=16).digest()
        digests.append(before)
    return digests


class BlockPool:
    """keys (blocks, Hkv, Dh, BLOCK_TOKENS) and values (blocks, Hkv, BLOCK_TOKENS, Dh), by layer.

    On a CPU the memory of a block is used when the block first is.
    """

    def __init__(
        self, config: ArchitectureConfig, dtype: torch.dtype, device: torch.device, num_blocks: int
    ):
        heads, size = config.num_kv_heads, config.head_dim
        shapes = ((num_blocks, heads, size, BLOCK_TOKENS), (num_blocks, heads, BLOCK_TOKENS, size))
        layers = range(config.num_layers)
        # Zeros, not garbage: masked positions are multiplied by probability 0, and 0 x NaN is NaN.
        self.keys = [_zeros(shapes[0], dtype, device) for _ in layers]
        self.values = [_zeros(shapes[1], dtype, device) for _ in layers]
        self._free = list(range(num_blocks))[::-1]  # the last is taken first
        self._holders = [0] * num_blocks
        self._digests: dict[int, tuple[str, Digest]] = {}  # by block
        self._blocks: dict[Digest, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # found by digest, held by nobody

    @staticmethod
    def bytes_per_block(config: ArchitectureConfig, dtype: torch.dtype) -> int:
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return per_token * BLOCK_TOKENS * dtype.itemsize

    @property
    def num_blocks(self) -> int:
        return len(self._holders)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int] | None:
        """That many blocks to write, held once; None when there are not so many."""
        if count > self.num_available:
            return None
        taken = [self._free.pop() if self._free else self._evicted() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def extend(self, blocks: list[int], num_tokens: int) -> bool:
        """To as many as that many tokens take; False when there are not so many."""
        missing = blocks_for(num_tokens) - len(blocks)
        if missing > 0:
            taken = self.take(missing)
            if taken is None:
                return False
            blocks += taken
        return True

    def hold(self, blocks: Iterable[int]) -> None:
        """Once more each."""
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(block, None)

    def drop(self, blocks: Sequence[int]) -> None:
        """Once less each. The ends of sequences are given up before their beginnings."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0, "dropped more often than held"
            if not self._holders[block]:
                if block in self._digests:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def find(self, digests: Sequence[Digest]) -> list[int]:
        """The blocks of the longest known beginning, held once more each."""
        found = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            found.append(block)
        self.hold(found)
        return found

    def name(self, block: int, version_id: str, digest: Digest) -> None:
        """From now on the full block can be found; where another has its content, that one is."""
        if digest not in self._blocks and block not in self._digests:
            self._blocks[digest] = block
            self._digests[block] = (version_id, digest)

    def forget(self, version_id: str) -> None:
        """Nothing of a version is found any more."""
        for block in [b for b, (version, _) in self._digests.items() if version == version_id]:
            del self._blocks[self._digests.pop(block)[1]]
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def copy(self, source: int, target: int) -> None:
        """The content of a block, all layers."""
        for tensor in (*self.keys, *self.values):
            tensor[target] = tensor[source]

    def _evicted(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._blocks[self._digests.pop(block)[1]]
        return block


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    whole = {4: np.int32, 2: np.int16}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, whole)).view(dtype)  # untouched pages take no memory
