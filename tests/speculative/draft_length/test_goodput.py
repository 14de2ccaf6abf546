"""The choice of tokens against trying all choices."""

import itertools

import numpy as np
import pytest

from tinkercloud.speculative.draft_length.goodput import Allocation, Limit, allocate, choose

B, D = 3, 3


def steps(rows: np.ndarray) -> np.ndarray:
    """A forward that takes rows by fours, and more for each."""
    return 10.0 + 8.0 * np.ceil((B + rows) / 4) + 0.3 * rows


def smooth(rows: np.ndarray) -> np.ndarray:
    return 20.0 + 2.0 * rows


def flat(rows: np.ndarray) -> np.ndarray:
    return np.full_like(rows, 10.0)


def steep(rows: np.ndarray) -> np.ndarray:
    return 1.0 + 10.0 * rows


COSTS = {"steps": steps, "smooth": smooth, "flat": flat, "steep": steep}


def drawn(seed: int) -> np.ndarray:
    coins = np.random.default_rng(seed)
    survival = np.cumprod(coins.random((B, D)) ** 0.5, 1)
    survival[np.arange(D) >= coins.integers(0, D + 1, B)[:, None]] = 0.0
    return survival


def best_of_all(survival: np.ndarray, ms, most_rows: float = np.inf) -> float:
    lengths = (survival > 0).sum(1)
    best = 0.0
    for counts in itertools.product(*(range(n + 1) for n in lengths)):
        gained = sum(survival[i, :n].sum() for i, n in enumerate(counts))
        if sum(counts) <= most_rows:
            best = max(best, (B + gained) / float(ms(np.array([sum(counts)], float))[0]))
    return best


def allocated(survival: np.ndarray, ms, limit: Limit | None = None) -> Allocation:
    plain_ms = float(ms(np.zeros(1))[0])
    cost = lambda taken, tokens: ms(taken)  # noqa: E731
    return allocate(survival, np.ones_like(survival), cost, plain_ms, limit)


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("seed", range(20))
def test_no_choice_brings_more(name, seed):
    survival, ms = drawn(seed), COSTS[name]
    allocation = allocated(survival, ms)
    gained = sum(survival[i, :n].sum() for i, n in enumerate(allocation.counts))
    rows = np.array([float(sum(allocation.counts))])
    assert (B + gained) / float(ms(rows)[0]) == pytest.approx(best_of_all(survival, ms))
    assert allocation.goodput == pytest.approx(best_of_all(survival, ms))


@pytest.mark.parametrize("seed", range(10))
def test_no_choice_within_the_rows_brings_more(seed):
    survival = drawn(seed)
    allocation = allocated(survival, smooth, Limit(rows=2))
    assert sum(allocation.counts) <= 2
    assert allocation.goodput == pytest.approx(best_of_all(survival, smooth, 2))


@pytest.mark.parametrize("seed", range(10))
def test_no_draft_is_chosen_beyond_its_end(seed):
    survival = drawn(seed)
    counts = allocated(survival, flat).counts
    assert list(counts) == (survival > 0).sum(1).tolist()


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("seed", range(20))
def test_drafts_that_have_come_are_chosen_like_those_that_are_foreseen(name, seed):
    survival, ms = drawn(seed), COSTS[name]
    coins = np.random.default_rng(seed)
    costs = ms(np.arange(B * D + 1.0))
    times_plain = (costs / costs[0]).tolist()
    for limit in (
        Limit(),
        Limit(rows=int(coins.integers(0, B * D))),
        Limit(urgency=1.0 + coins.random(B), sacrifice=float(coins.random())),
    ):
        chosen = choose([row[row > 0].tolist() for row in survival], times_plain, costs[0], limit)
        expected = allocated(survival, ms, limit)
        assert chosen.counts == expected.counts
        assert chosen.goodput == pytest.approx(expected.goodput)
        assert chosen.plain == pytest.approx(expected.plain)


def test_no_more_is_chosen_than_it_is_known_how_long_it_takes():
    assert choose([[1.0, 1.0], [0.9]], [1.0, 1.0, 1.0], 1.0).counts == (2, 0)


def test_behind_a_step_there_is_room():
    """One more token does not pay, four more do: stopping at the first would draft nothing."""
    survival = np.full((B, D), 0.9)
    assert sum(allocated(survival, lambda rows: 10.0 + 6.0 * (rows > 0)).counts) == B * D


def test_nothing_pays_where_each_row_costs_as_much_as_a_token():
    allocation = allocated(np.full((B, D), 0.99), steep)
    assert allocation.counts == (0, 0, 0) and allocation.gain == 0.0


def test_of_equals_the_beginning_of_a_draft_comes_first():
    """Of every draft, before the second tokens of any."""
    limit = Limit(rows=4)
    assert allocated(np.ones((B, D)), flat, limit).counts == (2, 1, 1)
    assert choose(np.ones((B, D)).tolist(), [1.0] * 10, 1.0, limit).counts == (2, 1, 1)
    hurried = Limit(rows=4, urgency=np.array([1.0, 2.0, 1.0]))
    assert allocated(np.ones((B, D)), flat, hurried).counts == (1, 3, 0)
    assert choose(np.ones((B, D)).tolist(), [1.0] * 10, 1.0, hurried).counts == (1, 3, 0)


def test_the_urgent_are_served_first():
    survival = np.tile([0.8, 0.78, 0.76], (B, 1))
    urgency = np.array([1.0, 1.0, 2.0])
    allocation = allocated(survival, smooth, Limit(rows=3, urgency=urgency, sacrifice=0.05))
    assert allocation.counts == (0, 0, 3)
    assert allocated(survival, smooth, Limit(rows=3)).counts == (1, 1, 1)


def test_urgency_costs_no_more_than_it_may():
    survival = np.array([[0.9, 0.8, 0.7], [0.9, 0.8, 0.7], [0.3, 0.2, 0.1]])
    urgency = np.array([1.0, 1.0, 9.0])
    allocation = allocated(survival, flat, Limit(rows=3, urgency=urgency))
    assert allocation == allocated(survival, flat, Limit(rows=3))


def test_drafts_that_will_be_short_take_few_rows():
    """Asked for, but expected in one of ten rounds only: the rows are counted as often."""
    survival, rows = np.full((B, D), 0.09), np.full((B, D), 0.1)
    cost = lambda taken, tokens: 10.0 + 1.0 * taken  # noqa: E731
    assert allocate(survival, rows, cost, 10.0).counts == (D, D, D)
