# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
"""`philox.plain_words` as one Triton kernel.

Axes: B rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkercloud.decoding import philox

_BLOCKS = 128  # counters of one program


def random_words(keys: Tensor, vocab_size: int) -> Tensor:
    """A `philox.random_words`."""
    out = torch.empty(len(keys), vocab_size, dtype=torch.int32, device=keys.device)
    grid = (len(keys), triton.cdiv(vocab_size, _BLOCKS * philox.PER_BLOCK))
    constants = {
        "MULTIPLIER_0": philox.MULTIPLIERS[0],
        "MULTIPLIER_1": philox.MULTIPLIERS[1],
        "STEP_0": philox.KEY_STEPS[0],
        "STEP_1": philox.KEY_STEPS[1],
    }
    _words[grid](keys, out, vocab_size, BLOCKS=_BLOCKS, ROUNDS=philox.ROUNDS, **constants)
    return out.long() & philox.LOW  # `&` of int32 stays int32, and half of the numbers negative


@triton.jit
def _words(  # noqa: PLR0913 - a kernel
    keys, out, vocab_size,
    BLOCKS: tl.constexpr, ROUNDS: tl.constexpr,
    MULTIPLIER_0: tl.constexpr, MULTIPLIER_1: tl.constexpr,
    STEP_0: tl.constexpr, STEP_1: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    zero = tl.zeros([BLOCKS], tl.uint64)
    c0 = (block + 1).to(tl.uint64)
    c1 = zero + tl.load(keys + row * 3 + 2).to(tl.uint64, bitcast=True)
    c2 = zero
    c3 = zero
    k0 = zero + tl.load(keys + row * 3).to(tl.uint64, bitcast=True)
    k1 = zero + tl.load(keys + row * 3 + 1).to(tl.uint64, bitcast=True)
    m0 = tl.full([BLOCKS], MULTIPLIER_0, tl.uint64)
    m1 = tl.full([BLOCKS], MULTIPLIER_1, tl.uint64)
    s0 = tl.full([BLOCKS], STEP_0, tl.uint64)
    s1 = tl.full([BLOCKS], STEP_1, tl.uint64)
    for _ in tl.static_range(ROUNDS):
        high0 = tl.umulhi(c0, m0)
        low0 = c0 * m0
        high1 = tl.umulhi(c2, m1)
        low1 = c2 * m1
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 += s0
        k1 += s1
    at = block * 8
    base = out + row * vocab_size
    _store(base, at, c0, vocab_size)
    _store(base, at + 2, c1, vocab_size)
    _store(base, at + 4, c2, vocab_size)
    _store(base, at + 6, c3, vocab_size)


@triton.jit
def _store(base, at, number, vocab_size):
    """Two numbers of 32 bits, the lower half first."""
    low = (number & 0xFFFFFFFF).to(tl.uint32)
    high = (number >> 32).to(tl.uint32)
    tl.store(base + at, low.to(tl.int32, bitcast=True), mask=at < vocab_size)
    tl.store(base + at + 1, high.to(tl.int32, bitcast=True), mask=at + 1 < vocab_size)
