"""The random numbers of `sampler.gumbel_noise`, on any device: Philox4x64-10, through torch.

J. Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011). torch multiplies int64 modulo
2**64 and shifts with the sign; the upper half of a product is put together from halves.

Axes: B rows, V vocabulary.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

ROUNDS = 10
PER_BLOCK = 8  # random numbers of 32 bits that one counter gives
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
LOW = 0xFFFFFFFF


def signed(number: int) -> int:
    """The int64 with the bits of a uint64."""
    return number - 2**64 if number >= 2**63 else number


def random_words(keys: Tensor, vocab_size: int) -> Tensor:
    """keys int64 (B, 3): seed (its 64 bits), sample index, position of each row -> (B, V) int64 in
    [0, 2**32), entry x of a row the number that makes the noise of token x."""
    if keys.is_cuda and _has_triton():
        from tinkercloud.decoding.philox_kernel import random_words as compiled

        return compiled(keys, vocab_size)
    return plain_words(keys, vocab_size)


def plain_words(keys: Tensor, vocab_size: int) -> Tensor:
    """`random_words` through torch."""
    num_blocks = -(-vocab_size // PER_BLOCK)
    first = torch.arange(1, num_blocks + 1, device=keys.device).expand(len(keys), -1)
    zero = torch.zeros_like(first)
    counter = (first, keys[:, 2:].expand_as(first), zero, zero)
    key = [keys[:, :1], keys[:, 1:2]]
    for _ in range(ROUNDS):
        counter = _round(counter, key)
        key = [part + signed(step) for part, step in zip(key, KEY_STEPS, strict=True)]
    halves = [half for part in counter for half in (part & LOW, (part >> 32) & LOW)]
    return torch.stack(halves, -1).flatten(1)[:, :vocab_size]


def _round(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    first, second = MULTIPLIERS
    high0, low0 = _upper(counter[0], first), counter[0] * signed(first)
    high1, low1 = _upper(counter[2], second), counter[2] * signed(second)
    return high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0


def _upper(x: Tensor, factor: int) -> Tensor:
    """The upper 64 bits of the product of two uint64."""
    factor_low, factor_high = factor & LOW, factor >> 32
    low, high = x & LOW, (x >> 32) & LOW
    middle = high * factor_low + (((low * factor_low) >> 32) & LOW)
    other = low * factor_high + (middle & LOW)
    return high * factor_high + ((middle >> 32) & LOW) + ((other >> 32) & LOW)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
