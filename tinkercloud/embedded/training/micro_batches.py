"""How a batch is cut into micro-batches, by tokens and by memory.

Axes: T tokens of a micro-batch, D hidden, I intermediate, Hq/Hkv heads, Dh head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.core.types import Datum
from tinkercloud.embedded.training.layout import PrefixTree, alike_together

ACTIVATION_BYTES = 2 * 1024**3
"""Default of `Limits.activation_bytes`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """tokens: of one micro-batch, a shared prefix counted once, unless one datum alone has more;
    datums that share at least half of theirs may come on top of the first one. activation_bytes:
    what the blocks may keep for the backward pass; a datum that needs more is recomputed block by
    block."""

    tokens: int = 1024
    activation_bytes: int = ACTIVATION_BYTES


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """What all blocks keep for the backward pass: for each row, and in attention, where a shared
    row has an entry for each of its datums, for each token. An upper bound."""

    row: int
    token: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """indices: datums of a batch. recompute: keep the blocks' inputs only."""

    indices: tuple[int, ...]
    num_rows: int
    recompute: bool


def kept_bytes(config: ArchitectureConfig, element_bytes: int, *, is_compiled: bool) -> KeptBytes:
    """A block keeps its input and what follows attention (D each), and what enters norms after
    attention and MLP; attention's result, gate and up (I each); q, k and v, and q and k before the
    norms of heads where there are such. The compiled pass keeps what lies between blocks and before
    norms in float32, everything by rows. PyTorch's attention keeps its own q, k, v and result, and
    once more where it is padded."""
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    after = (config.norms.after_attention, config.norms.after_mlp)
    residual = (2 + sum(name is not None for name in after)) * config.hidden_size
    raw = (heads + kv_heads) * config.qk_norm
    numbers = heads + 2 * config.intermediate_size
    layers = config.num_layers
    if is_compiled:
        numbers += heads + 2 * kv_heads
        return KeptBytes(layers * (numbers * element_bytes + (residual + raw) * 4), 0)
    row = (residual + raw + numbers) * element_bytes
    return KeptBytes(layers * row, layers * (2 * heads + 3 * kv_heads) * element_bytes)


def micro_batches(
    data: Sequence[Datum], limits: Limits, kept: KeptBytes, *, shares: bool = True
) -> Iterator[MicroBatch]:
    """Datums within both limits, at least one to a micro-batch, in their order except that those
    with a common prefix follow the first of them. Depends on the batch and the limits alone, so
    that a batch gives the same gradient under any load. shares False: the pass will compute every
    datum whole."""
    builder = _MicroBatchBuilder(limits, kept, shares)
    for i in alike_together(data):
        if builder.indices and not builder.has_room(data[i]):
            yield builder.finish()
            builder = _MicroBatchBuilder(limits, kept, shares)
        builder.add(i, data[i])
    if builder.indices:
        yield builder.finish()


class _MicroBatchBuilder:
    """Collects the datums of one micro-batch."""

    def __init__(self, limits: Limits, kept: KeptBytes, shares: bool):
        self._limits, self._kept = limits, kept
        self._tree = PrefixTree(shares=shares)
        self._num_tokens = self._first_rows = 0
        self.indices: list[int] = []

    def has_room(self, datum: Datum) -> bool:
        new, tokens = self._tree.num_new(datum.tokens), len(datum.tokens)
        rows, max_rows = self._tree.num_rows + new, self._limits.tokens
        if 2 * new <= tokens:  # in a micro-batch of its own it would compute the prefix again
            max_rows += self._first_rows
        num_bytes = self._num_bytes(rows, self._num_tokens + tokens)
        return rows <= max_rows and num_bytes <= self._limits.activation_bytes

    def add(self, index: int, datum: Datum) -> None:
        self._tree.add(datum.tokens)
        self._num_tokens += len(datum.tokens)
        if not self.indices:
            self._first_rows = self._tree.num_rows
        self.indices.append(index)

    def finish(self) -> MicroBatch:
        rows = self._tree.num_rows
        recompute = self._num_bytes(rows, self._num_tokens) > self._limits.activation_bytes
        return MicroBatch(tuple(self.indices), rows, recompute)

    def _num_bytes(self, rows: int, tokens: int) -> int:
        return self._kept.row * rows + self._kept.token * tokens
