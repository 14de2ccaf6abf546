"""Verification against what it promises: three tokens of a Markov chain, counted.

A rule that is right is within four standard deviations of the mean chi-square; rules that are known
to be wrong are far outside, so that the counting would see them.
"""

from bisect import bisect
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tinkercloud.speculative import verify

V, K, ROUNDS = 4, 3, 12_000
LENGTH = 3  # tokens that are counted together
START = 0

Distribution = verify.Distribution
Distributions = np.ndarray  # (K, V) or (K + 1, V)
Noise = list[float]  # (K + 1,), uniform in [0, 1): of each place
Rule = Callable[["Toy", int, Noise], Sequence[int]]


def warped(probs: Distributions, temperature: float, top_k: int) -> Distributions:
    logits = np.log(probs) / temperature
    kept = logits >= np.sort(logits, -1)[:, -top_k][:, None]
    weights = np.where(kept, np.exp(logits), 0.0)
    return weights / weights.sum(-1, keepdims=True)


def cumulated(probs: Distributions) -> list[list[float]]:
    """Of each row, with a last sum that no coin reaches."""
    return [[*sums[:-1], 1.0] for sums in np.cumsum(probs, -1).tolist()]


class Toy:
    """Target and draft, each a distribution of the next token after the last, (V, V)."""

    def __init__(self, seed: int, closeness: float = 0.5):
        generator = np.random.default_rng(seed)
        raw = generator.dirichlet(np.full(V, 0.8), V)
        other = generator.dirichlet(np.full(V, 0.8), V)
        mixed = closeness * raw + (1 - closeness) * other
        self.p = warped(raw, 0.8, 3)
        self.q = warped(mixed, 1.3, V)  # the draft's own warping
        self.likeliest = self.q.argmax(-1).tolist()
        self._p_sums, self._q_sums = cumulated(self.p), cumulated(self.q)

    def target(self, before: Sequence[int], noise: Noise) -> list[int]:
        """The target's own tokens after each of `before`, with each one's noise."""
        return [bisect(self._p_sums[c], coin) for c, coin in zip(before, noise, strict=True)]

    def drafted_greedily(self, last: int) -> list[int]:
        tokens = [last]
        for _ in range(K):
            tokens.append(self.likeliest[tokens[-1]])
        return tokens[1:]

    def drafted_with(self, noise: Noise, last: int) -> list[int]:
        tokens = [last]
        for coin in noise[:K]:
            tokens.append(bisect(self._q_sums[tokens[-1]], coin))
        return tokens[1:]

    def joint(self) -> np.ndarray:
        """The distribution of the first LENGTH tokens, (V,) * LENGTH."""
        p = self.p
        return p[START][:, None, None] * p[:, :, None] * p[None, :, :]


def counted(rule: Rule, toy: Toy, seed: int = 1) -> float:
    """Standard deviations of the chi-square of the counts from its mean."""
    coins = np.random.default_rng(seed)
    seen = np.zeros((V,) * LENGTH)
    for _ in range(ROUNDS):
        tokens: list[int] = []
        while len(tokens) < LENGTH:
            tokens += rule(toy, tokens[-1] if tokens else START, coins.random(K + 1).tolist())
        seen[tuple(tokens[:LENGTH])] += 1
    expected = toy.joint() * ROUNDS
    possible = expected > 0
    if seen[~possible].any():
        return np.inf
    squares = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    return float((squares - freedom) / np.sqrt(2 * freedom))


# ---- rules that are right


def matched_of_a_habit(toy: Toy, last: int, noise: Noise) -> Sequence[int]:
    drafted = [(last + 1) % V, (last + 2) % V, last]
    return verify.match(drafted, toy.target([last, *drafted], noise)).tokens


def matched_of_the_best(toy: Toy, last: int, noise: Noise) -> Sequence[int]:
    drafted = toy.drafted_greedily(last)
    return verify.match(drafted, toy.target([last, *drafted], noise)).tokens


def matched_with_the_same_noise(toy: Toy, last: int, noise: Noise) -> Sequence[int]:
    drafted = toy.drafted_with(noise, last)
    return verify.match(drafted, toy.target([last, *drafted], noise)).tokens


RIGHT = (matched_of_a_habit, matched_of_the_best, matched_with_the_same_noise)


# ---- rules that are known to be wrong


def drawn_again_after_a_difference(toy: Toy, last: int, noise: Noise) -> Sequence[int]:
    """The draw that differed is forgotten, so that the drafted token has a second chance."""
    *noise, another = noise
    drafted = toy.drafted_greedily(last)[: K - 1]
    tokens = verify.match(drafted, toy.target([last, *drafted], noise)).tokens
    return [*tokens[:-1], *toy.target([last, *tokens][-2:-1], [another])]


def judged_one_place_late(toy: Toy, last: int, noise: Noise) -> Sequence[int]:
    """By the distributions before the drafted tokens, not after them."""
    drafted = toy.drafted_greedily(last)
    return verify.match(drafted, toy.target([last, last, *drafted[:-1]], noise)).tokens


def taken_beyond_a_difference(toy: Toy, last: int, noise: Noise) -> Sequence[int]:
    """What the target drew after drafted tokens that are not taken."""
    drafted = toy.drafted_greedily(last)
    return toy.target([last, *drafted], noise)


def noise_used_twice(toy: Toy, last: int, noise: Noise) -> Sequence[int]:
    noise = [noise[0], *noise[:K]]
    drafted = toy.drafted_with(noise, last)
    return verify.match(drafted, toy.target([last, *drafted], noise)).tokens


WRONG = (
    drawn_again_after_a_difference,
    judged_one_place_late,
    taken_beyond_a_difference,
    noise_used_twice,
)


@pytest.mark.parametrize("rule", RIGHT, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_follow_the_targets_law(rule, seed):
    assert abs(counted(rule, Toy(seed))) < 4


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: rule.__name__)
def test_a_rule_that_is_known_to_be_wrong_is_seen(rule):
    assert counted(rule, Toy(0)) > 40


# ---- what else the rules promise


def test_without_a_draft_the_token_is_the_targets():
    verdict = verify.match([], [1])
    assert verdict.tokens == (1,)
    assert verdict.num_accepted == 0


def test_matching_takes_the_targets_tokens_up_to_the_first_difference():
    assert verify.match([5, 6, 7], [5, 6, 8, 9]).tokens == (5, 6, 8)
    assert verify.match([5, 6, 7], [5, 6, 7, 9]).tokens == (5, 6, 7, 9)
    assert verify.match([5], [4, 5]).tokens == (4,)


def test_a_draft_needs_one_token_more_of_the_target():
    with pytest.raises(ValueError, match="need"):
        verify.match([1, 2], [1, 2])


# ---- how often a draft is accepted

V_COUPLED = 6


def gumbel(p: Distribution, noise: np.ndarray) -> int:
    with np.errstate(divide="ignore"):
        return int((np.log(p) + noise).argmax())


def test_the_expected_share_is_that_which_is_counted():
    toy, coins = Toy(4), np.random.default_rng(2)
    p, q = toy.p[START], toy.q[START]
    rounds, equal = 20_000, 0
    for _ in range(rounds):
        noise = coins.gumbel(size=V)
        equal += gumbel(p, noise) == gumbel(q, noise)
    assert equal / rounds == pytest.approx(coupled_share(p, q), abs=0.015)


def coupled_share(p: Distribution, q: Distribution) -> float:
    """The chance that draws from p and from q with the same noise are equal."""
    return sum(q[x] * verify.coupled_chance(p, q, x) for x in range(len(q)))


@pytest.mark.parametrize("top_k", [4, V_COUPLED], ids=["cut", "whole"])
@pytest.mark.parametrize("missing", [0, 2])
def test_coupled_draws_are_equal_as_often_as_is_said_of_each_token(top_k, missing):
    """Whichever token the draft has drawn, of which some are none of the target's or none of its
    own."""
    generator = np.random.default_rng(11)
    p, other = generator.dirichlet(np.full(V_COUPLED, 0.8), 2)
    q = 0.5 * p + 0.5 * other
    p = warped(p[None], 0.8, top_k)[0]
    q[:missing] = 0.0
    q /= q.sum()
    noise = generator.gumbel(size=(200_000, V_COUPLED))
    with np.errstate(divide="ignore"):
        of_p, of_q = ((np.log(x) + noise).argmax(1) for x in (p, q))
    for token in range(V_COUPLED):
        drawn = of_q == token
        chance = verify.coupled_chance(p, q, token)
        if q[token] == 0:
            assert not drawn.any() and chance == 0
            continue
        error = np.sqrt(chance * (1 - chance) / drawn.sum())
        assert abs((of_p[drawn] == token).mean() - chance) <= 4 * error


def test_the_share_of_coupled_draws_is_the_sum_it_is_defined_by():
    generator = np.random.default_rng(7)
    for _ in range(20):
        p, q = generator.dirichlet(np.full(30, 0.3), 2)
        q[generator.integers(0, 30, 5)] = 0.0
        p[generator.integers(0, 30, 5)] = 0.0
        p, q = p / p.sum(), q / q.sum()
        slow = sum(
            1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(30) if p[x] > 0 and q[x] > 0
        )
        assert coupled_share(p, q) == pytest.approx(slow, rel=1e-9)
        distance = 1 - np.minimum(p, q).sum()  # in total variation
        assert slow >= (1 - distance) / (1 + distance) - 1e-12


def test_a_chance_is_one_for_equal_laws_and_none_where_a_law_cannot_give_the_token():
    p = np.array([0.7, 0.3, 0.0])
    assert verify.coupled_chance(p, p, 0) == verify.coupled_chance(p, p, 1) == pytest.approx(1.0)
    assert verify.coupled_chance(p, np.array([0.0, 0.5, 0.5]), 2) == 0
    assert verify.coupled_chance(np.array([1.0, 5e-324]), np.array([0.5, 0.5]), 1) == 0
