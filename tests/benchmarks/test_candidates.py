"""The bound on what a second candidate for a position brings."""

import numpy as np
import pytest

from benchmarks.lib.candidates import chain_tokens, times_chain, tree_tokens


def test_a_tree_of_three_nodes_by_hand() -> None:
    """The first candidate, and two nodes that are reached in a quarter of rounds."""
    assert tree_tokens(0.5, 0.5, 3) == pytest.approx([1, 1.5, 1.75, 2.0])
    assert chain_tokens(0.5, 3) == pytest.approx([1, 1.5, 1.75, 1.875])


def test_a_tree_accepts_what_random_candidates_do() -> None:
    """Full trees of depth two: six nodes."""
    generator, first, second = np.random.default_rng(0), 0.6, 0.5
    drawn = generator.random((20_000, 2)) < first + (1 - first) * second
    walked = 1 + drawn[:, 0].mean() + (drawn[:, 0] & drawn[:, 1]).mean()
    full = 1 + 0.8 + 0.8**2
    assert walked == pytest.approx(full, abs=0.02)
    assert tree_tokens(first, second, 6)[-1] >= full  # no tree of six nodes brings more


def test_second_candidates_pay_where_rows_are_cheap_and_no_other_token_is_likelier() -> None:
    cheap, dear = [1 + 0.05 * n for n in range(9)], [1 + 0.5 * n for n in range(9)]
    assert times_chain(0.4, 0.5, cheap) > 1.1
    assert times_chain(0.4, 0.0, cheap) == pytest.approx(1)
    assert times_chain(0.9, 0.5, cheap) == pytest.approx(1, abs=0.05)
    assert times_chain(0.7, 0.5, dear) == pytest.approx(1)
