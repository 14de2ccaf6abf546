"""The products of attention, counted as PaLM's model FLOPs utilization counts them (Chowdhery et
al. 2022, arXiv 2204.02311, appendix B), but only of the keys that a query sees: half as many for a
whole sequence."""

from collections.abc import Iterable

from tinkercloud.architectures.config import ArchitectureConfig

FORWARD, TRAINING = 1, 3  # the backward pass has four products where the forward pass has two


def num_pairs(length: int, *, after: int = 0) -> int:
    """Of a query and a key that it sees, of the tokens from `after` on to before `length`."""
    return (length * (length + 1) - after * (after + 1)) // 2


def attention_flop(
    config: ArchitectureConfig, pairs: Iterable[int], passes: int = FORWARD
) -> float:
    """A query times a key, and a probability times a value, in every head of every layer."""
    each = 4.0 * config.num_heads * config.head_dim * config.num_layers
    return passes * each * sum(pairs)
