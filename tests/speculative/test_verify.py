"""The rules of verification against what they promise: three tokens of a Markov chain, counted.

A rule that is right is within four standard deviations of the mean chi-square; each of the known
wrong ones is far outside, so that the counting would see it.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tinkercloud.speculative import verify

V, K, ROUNDS = 4, 3, 12_000
LENGTH = 3  # tokens that are counted together
START = 0

Distribution = verify.Distribution
Distributions = verify.Distributions
Rule = Callable[["Toy", int, np.random.Generator], Sequence[int]]


def warped(probs: Distributions, temperature: float, top_k: int) -> Distributions:
    logits = np.log(probs) / temperature
    kept = logits >= np.sort(logits, -1)[:, -top_k][:, None]
    weights = np.where(kept, np.exp(logits), 0.0)
    return weights / weights.sum(-1, keepdims=True)


class Toy:
    """Target and draft, each a distribution of the next token after the last, (V, V)."""

    def __init__(self, seed: int, closeness: float = 0.5):
        generator = np.random.default_rng(seed)
        self.raw = generator.dirichlet(np.full(V, 0.8), V)
        other = generator.dirichlet(np.full(V, 0.8), V)
        mixed = closeness * self.raw + (1 - closeness) * other
        self.p = warped(self.raw, 0.8, 3)
        self.q = warped(mixed, 1.3, V)  # the draft's own warping
        self.q_raw = mixed

    def draft(self, last: int, coins: np.random.Generator, count: int = K) -> list[int]:
        tokens = [last]
        for _ in range(count):
            tokens.append(verify.draw(self.q[tokens[-1]], coins.random()))
        return tokens[1:]

    def probs(self, last: int, drafted: Sequence[int]) -> tuple[Distributions, Distributions]:
        """(K + 1, V) of the target and (K, V) of the draft."""
        before = [last, *drafted]
        return self.p[before], self.q[before[:-1]]

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
            tokens += rule(toy, tokens[-1] if tokens else START, coins)
        seen[tuple(tokens[:LENGTH])] += 1
    expected = toy.joint() * ROUNDS
    possible = expected > 0
    if seen[~possible].any():
        return np.inf
    squares = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    return float((squares - freedom) / np.sqrt(2 * freedom))


# ---- rules that are right


def chain(toy: Toy, last: int, coins: np.random.Generator) -> Sequence[int]:
    drafted = toy.draft(last, coins)
    return verify.chain(*toy.probs(last, drafted), drafted, coins.random(K + 1)).tokens


def block(toy: Toy, last: int, coins: np.random.Generator) -> Sequence[int]:
    drafted = toy.draft(last, coins)
    return verify.block(*toy.probs(last, drafted), drafted, coins.random(K + 1)).tokens


def point_mass_of_a_habit(toy: Toy, last: int, coins: np.random.Generator) -> Sequence[int]:
    drafted = [(last + 1) % V, (last + 2) % V, last]
    return verify.point_mass(toy.probs(last, drafted)[0], drafted, coins.random(K + 1)).tokens


def point_mass_of_the_best(toy: Toy, last: int, coins: np.random.Generator) -> Sequence[int]:
    drafted, at = [], last
    for _ in range(K):
        at = int(toy.q[at].argmax())
        drafted.append(at)
    return verify.point_mass(toy.probs(last, drafted)[0], drafted, coins.random(K + 1)).tokens


def gumbel(p: Distribution, noise: np.ndarray) -> int:
    with np.errstate(divide="ignore"):
        return int((np.log(p) + noise).argmax())


def matched_with_the_same_noise(toy: Toy, last: int, coins: np.random.Generator) -> Sequence[int]:
    noise = coins.gumbel(size=(K + 1, V))
    drafted, at = [], last
    for i in range(K):
        at = gumbel(toy.q[at], noise[i])
        drafted.append(at)
    before = [last, *drafted]
    target = [gumbel(toy.p[c], g) for c, g in zip(before, noise, strict=True)]
    return verify.match(drafted, target).tokens


RIGHT = (
    chain,
    block,
    point_mass_of_a_habit,
    point_mass_of_the_best,
    matched_with_the_same_noise,
)


# ---- rules that are known to be wrong


def replaced_from_the_target(toy: Toy, last: int, coins: np.random.Generator) -> Sequence[int]:
    """After a rejection the target's distribution instead of the residual."""
    drafted = toy.draft(last, coins)
    p, q = toy.probs(last, drafted)
    for i, token in enumerate(drafted):
        if coins.random() * q[i, token] >= p[i, token]:
            return [*drafted[:i], verify.draw(p[i], coins.random())]
    return [*drafted, verify.draw(p[K], coins.random())]


def asked_before_warping(toy: Toy, last: int, coins: np.random.Generator) -> Sequence[int]:
    """Tested before temperature and top-k, drawn after them."""
    drafted = toy.draft(last, coins)
    before = [last, *drafted]
    raw, q_raw = toy.raw[before], toy.q_raw[before]
    p, q = toy.probs(last, drafted)
    for i, token in enumerate(drafted):
        if coins.random() * q_raw[i, token] >= raw[i, token]:
            return [*drafted[:i], verify.draw(verify.residual(p[i], q[i]), coins.random())]
    return [*drafted, verify.draw(p[K], coins.random())]


def chosen_but_tested_as_drawn(toy: Toy, last: int, coins: np.random.Generator) -> Sequence[int]:
    """The draft's best token, tested with its probability as if it had been drawn."""
    drafted, at = [], last
    for _ in range(K):
        at = int(toy.q[at].argmax())
        drafted.append(at)
    return verify.chain(*toy.probs(last, drafted), drafted, coins.random(K + 1)).tokens


WRONG = (
    replaced_from_the_target,
    asked_before_warping,
    chosen_but_tested_as_drawn,
)


@pytest.mark.parametrize("rule", RIGHT, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_follow_the_targets_law(rule, seed):
    assert abs(counted(rule, Toy(seed))) < 4


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: rule.__name__)
def test_a_rule_that_is_known_to_be_wrong_is_seen(rule):
    assert counted(rule, Toy(0)) > 40


# ---- what else the rules promise


def test_block_verification_accepts_no_fewer_tokens():
    toy, coins = Toy(3), np.random.default_rng(5)
    by_chain, by_block = 0, 0
    for _ in range(6000):
        drafted = toy.draft(START, coins)
        arguments = (*toy.probs(START, drafted), drafted, coins.random(K + 1))
        by_chain += verify.chain(*arguments).num_accepted
        by_block += verify.block(*arguments).num_accepted
    assert by_block > by_chain * 1.005


def test_a_draft_that_is_the_target_is_always_accepted():
    toy, coins = Toy(2), np.random.default_rng(0)
    toy.q = toy.p
    for rule in (verify.chain, verify.block):
        for _ in range(200):
            drafted = toy.draft(START, coins)
            verdict = rule(*toy.probs(START, drafted), drafted, coins.random(K + 1))
            assert verdict.tokens[:K] == tuple(drafted)


def test_without_a_draft_the_token_is_the_targets():
    p = np.array([[0.0, 1.0, 0.0]])
    none = np.zeros((0, 3))
    for verdict in (
        verify.chain(p, none, [], [0.3]),
        verify.block(p, none, [], [0.3]),
        verify.point_mass(p, [], [0.3]),
        verify.match([], [1]),
    ):
        assert verdict.tokens == (1,)
        assert verdict.num_accepted == 0


def test_matching_takes_the_targets_tokens_up_to_the_first_difference():
    assert verify.match([5, 6, 7], [5, 6, 8, 9]).tokens == (5, 6, 8)
    assert verify.match([5, 6, 7], [5, 6, 7, 9]).tokens == (5, 6, 7, 9)
    assert verify.match([5], [4, 5]).tokens == (4,)


@pytest.mark.parametrize(
    "call",
    [
        lambda: verify.match([1, 2], [1, 2]),
        lambda: verify.chain(np.ones((2, 2)), np.ones((2, 2)), [0], [0.1, 0.2]),
        lambda: verify.point_mass(np.ones((1, 2)), [0], [0.1, 0.2]),
    ],
)
def test_arguments_that_do_not_belong_together_are_refused(call):
    with pytest.raises(ValueError, match=r"need|before"):
        call()


# ---- how often a draft is accepted

V_COUPLED = 6


def test_expected_shares_are_those_that_are_counted():
    toy, coins = Toy(4), np.random.default_rng(2)
    p, q = toy.p[START], toy.q[START]
    rounds, accepted, equal = 20_000, 0, 0
    for _ in range(rounds):
        token = verify.draw(q, coins.random())
        accepted += coins.random() * q[token] < p[token]
        noise = coins.gumbel(size=V)
        equal += gumbel(p, noise) == gumbel(q, noise)
    assert accepted / rounds == pytest.approx(overlap(p, q), abs=0.015)
    assert equal / rounds == pytest.approx(coupled_share(p, q), abs=0.015)


def overlap(p: Distribution, q: Distribution) -> float:
    """The chance that a token drawn from q is accepted by `chain`: 1 less the total variation."""
    return float(np.minimum(p, q).sum())


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
        distance = 1 - overlap(p, q)
        assert slow >= (1 - distance) / (1 + distance) - 1e-12


def test_a_chance_is_one_for_equal_laws_and_none_where_a_law_cannot_give_the_token():
    p = np.array([0.7, 0.3, 0.0])
    assert verify.coupled_chance(p, p, 0) == verify.coupled_chance(p, p, 1) == pytest.approx(1.0)
    assert verify.coupled_chance(p, np.array([0.0, 0.5, 0.5]), 2) == 0
    assert verify.coupled_chance(np.array([1.0, 5e-324]), np.array([0.5, 0.5]), 1) == 0
