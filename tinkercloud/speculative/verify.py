"""Which drafted tokens are accepted. Pure functions: arrays and coins in, tokens out.

Two families of rules, both lossless. Matching: the target's token of every position is drawn first,
with noise keyed by the position, as it is without a draft; a drafted token is accepted if it is
that token. So the output depends on nothing of the draft, not even on which of its tokens were
accepted. Rejection (`chain`, `block`, `point_mass`): the output has the target's
distribution, whatever the draft is, but another draft gives other tokens.

Every distribution here is the one after temperature, top-k and top-p: testing one and drawing from
another would be biased. The draft's may be warped differently, as long as its tokens were drawn
from it.

Axes: K drafted tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Distribution = NDArray[np.float64]  # (V,), sums to 1
Distributions = NDArray[np.float64]  # (K, V) or (K + 1, V)


@dataclass(frozen=True, slots=True)
class Verdict:
    """tokens: what is emitted, the drafted ones that are accepted and one that the target adds."""

    tokens: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        return len(self.tokens) - 1


# ---- matching


def match(drafted: Sequence[int], target: Sequence[int]) -> Verdict:
    """drafted (K,); target (K + 1,): the target's own tokens, each drawn after the drafted ones
    before it, so that only those up to the first difference mean anything."""
    if len(target) != len(drafted) + 1:
        raise ValueError(f"{len(drafted)} drafted tokens need one more of the target")
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == target[accepted]:
        accepted += 1
    return Verdict(tuple(target[: accepted + 1]))


# ---- rejection


def draw(weights: Distribution, coin: float) -> int:
    """A token with probability in proportion to its weight (V,), by inversion; coin in [0, 1)."""
    upto = np.cumsum(weights)
    token = int(np.searchsorted(upto, coin * upto[-1], side="right"))
    # coin * sum may round up to the sum, past the last token that has weight.
    return min(token, int(np.flatnonzero(weights)[-1]))


def residual(p: Distribution, q: Distribution) -> Distribution:
    """What p, or a share of it, has in excess of q, normalized; p where rounding leaves nothing, in
    which case rejection has probability 0 but for rounding."""
    excess = np.maximum(p - q, 0.0)
    total = excess.sum()
    return excess / total if total > 0 else p


def chain(
    p: Distributions, q: Distributions, drafted: Sequence[int], coins: Sequence[float]
) -> Verdict:
    """Speculative sampling (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318).

    p (K + 1, V) target, q (K, V) draft, drafted (K,) with drafted[i] drawn from q[i]; coins
    (K + 1,) uniform in [0, 1).
    """
    _check(p, drafted, coins, q)
    for i, token in enumerate(drafted):
        if coins[i] * q[i, token] >= p[i, token]:  # no division: q may be tiny
            return Verdict((*drafted[:i], draw(residual(p[i], q[i]), coins[-1])))
    return Verdict((*drafted, draw(p[-1], coins[-1])))


def block(
    p: Distributions, q: Distributions, drafted: Sequence[int], coins: Sequence[float]
) -> Verdict:
    """Block verification (Sun et al. 2403.10444, equations 4 and 5): the tokens are judged
    together; on average never fewer of them are accepted than by `chain` (theorem 2). Arguments as
    there."""
    _check(p, drafted, coins, q)
    shares = [1.0]  # of the target's mass that the draft's prefix can still carry
    for i, token in enumerate(drafted):
        ratio = p[i, token] / q[i, token] if q[i, token] > 0 else np.inf
        shares.append(min(1.0, shares[-1] * ratio))
    accepted = 0
    # Every length is tried, and the longest whose coin passes is taken: unlike in `chain` a prefix
    # that fails does not end the walk, as a longer one may make up for it.
    for i in range(1, len(drafted) + 1):
        if i == len(drafted):
            chance = shares[i]
        else:
            excess = np.maximum(shares[i] * p[i] - q[i], 0.0).sum()
            total = excess + 1.0 - shares[i]
            chance = excess / total if total > 0 else 0.0
        if coins[i - 1] < chance:
            accepted = i
    if accepted == len(drafted):
        return Verdict((*drafted, draw(p[-1], coins[-1])))
    last = residual(shares[accepted] * p[accepted], q[accepted])
    return Verdict((*drafted[:accepted], draw(last, coins[-1])))


def without(distribution: Distribution, token: int) -> Distribution:
    """Over everything but one token; zeros where nothing else has weight."""
    others = distribution.copy()
    others[token] = 0.0
    total = others.sum()
    return others / total if total > 0 else others


def point_mass(p: Distributions, drafted: Sequence[int], coins: Sequence[float]) -> Verdict:
    """Any proposal that comes without a distribution: text seen before, another tokenizer, a
    person.

    Exact for every one of them, and independent of it: given the draft, the output's distribution
    is p. (To test p / q with an old sample's q is right only averaged over old samples.)
    p (K + 1, V), drafted (K,), coins (K + 1,).
    """
    _check(p, drafted, coins)
    for i, token in enumerate(drafted):
        if coins[i] >= p[i, token]:
            return Verdict((*drafted[:i], draw(without(p[i], token), coins[-1])))
    return Verdict((*drafted, draw(p[-1], coins[-1])))


def _check(
    p: Distributions,
    drafted: Sequence[int],
    coins: Sequence[float],
    q: Distributions | None = None,
) -> None:
    many = len(drafted)
    if len(p) != many + 1 or len(coins) != many + 1 or (q is not None and len(q) != many):
        raise ValueError(
            f"{many} drafted tokens need {many + 1} distributions of the target, as many coins, "
            f"{many} distributions of the draft"
        )


# ---- how often a draft is accepted


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
