"""Which drafted tokens are accepted. Pure functions: arrays in, tokens out.

By matching: the target's token of every position is drawn first, with noise keyed by the position,
as it is without a draft; a drafted token is accepted if it is that token. So the output depends on
nothing of the draft, not even on which of its tokens were accepted. (The rules of the papers, by
chance and residual, keep the target's distribution alone: another draft gives other tokens.)

Axes: K drafted tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Distribution = NDArray[np.float64]  # (V,), sums to 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """tokens: what is emitted, the drafted ones that are accepted and one that the target adds."""

    tokens: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        return len(self.tokens) - 1


def match(drafted: Sequence[int], target: Sequence[int]) -> Verdict:
    """drafted (K,); target (K + 1,): the target's own tokens, each drawn after the drafted ones
    before it, so that only those up to the first difference mean anything."""
    if len(target) != len(drafted) + 1:
        raise ValueError(f"{len(drafted)} drafted tokens need one more of the target")
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == target[accepted]:
        accepted += 1
    return Verdict(tuple(target[: accepted + 1]))


def coupled_chance(p: Distribution, q: Distribution, token: int) -> float:
    """The chance that a token drawn from q is also what p gives with the same noise (Gumbel-max).

    Of the token that was drawn, since what is done with a draft may depend on which one it is.
    With independent exponential times E(x) of rate 1, argmax log p(x) + g(x) is the x of the
    smallest E(x) / p(x). A token x wins both races if every other y has
    E(y) > E(x) m(y) with m(y) = max(p(y) / p(x), q(y) / q(x)); given E(x) = t that has the
    probability exp(-t sum of m(y)), and over t, with m(x) = 1, 1 / sum_y m(y) (its sum over x is in
    Daliri et al. 2408.07978). x wins the draft's race with probability q(x), hence

        P(p gives x | q gave x) = 1 / sum_y max(p(y) q(x) / p(x), q(y)).

    q is 0 where the draft has no such token. 0 where either distribution cannot give the token.
    """
    if min(p[token], q[token]) < np.finfo(np.float64).tiny:
        return 0.0
    times = np.maximum(p * (q[token] / p[token]), q).sum()
    return float(min(1.0, 1.0 / times))
