"""How a batch is cut into micro-batches, by tokens and by memory.

Axes: T tokens of a micro-batch, D hidden, I intermediate, Hq/Hkv heads, Dh head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.core.types import Datum

ACTIVATION_BYTES = 2 * 1024**3
"""Default of `Limits.activation_bytes`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """tokens: of one micro-batch, unless one datum alone has more. activation_bytes: what the
    blocks may keep for the backward pass; a datum that needs more is recomputed block by block."""

    tokens: int = 1024
    activation_bytes: int = ACTIVATION_BYTES


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """indices: consecutive datums of a batch. recompute: keep the blocks' inputs only."""

    indices: tuple[int, ...]
    num_tokens: int
    recompute: bool


def kept_bytes_per_token(config: ArchitectureConfig, element_bytes: int, rank: int) -> int:
    """Bytes that all blocks keep of one token for the backward pass, an estimate from above.

    A block keeps its input and what follows attention (D each), q, k, v and attention's result, q
    and k a second time for families that norm them (or for the padding of ragged sequences), gate
    and up (I each), and seven low-rank products in float32.
    """
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    attention = 3 * heads + 3 * kv_heads
    values = 2 * config.hidden_size + attention + 2 * config.intermediate_size
    return config.num_layers * (values * element_bytes + 7 * rank * 4)


def micro_batches(
    data: Sequence[Datum], limits: Limits, bytes_per_token: int
) -> Iterator[MicroBatch]:
    """Consecutive datums within both limits, at least one to a micro-batch. Depends on the batch
    and the limits alone, so that a batch gives the same gradient whatever else is going on."""
    most = max(1, min(limits.tokens, limits.activation_bytes // bytes_per_token))
    indices: list[int] = []
    num_tokens = 0

    def cut() -> MicroBatch:
        recompute = num_tokens * bytes_per_token > limits.activation_bytes
        return MicroBatch(tuple(indices), num_tokens, recompute)

    for i, datum in enumerate(data):
        if indices and num_tokens + len(datum.tokens) > most:
            yield cut()
            indices, num_tokens = [], 0
        indices.append(i)
        num_tokens += len(datum.tokens)
    if indices:
        yield cut()
