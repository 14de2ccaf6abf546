"""The sampler's pure functions against their definitions."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch

from tests.decoding.rows import NO_CUT, row_params
from tests.embedded.tiny import expected_distribution
from tinkercloud.decoding.sampler import (
    gumbel_noise,
    keep_mask,
    logprobs_of,
    lowest_argmax,
    sample,
    warp,
)
from tinkercloud.embedded.native import bindings, compiler


def test_sampled_frequencies_follow_the_distribution() -> None:
    """Chi-square over 20,000 independent keys; the 99.99 % point of 9 degrees is 33.7."""
    logits = torch.linspace(-2, 2, 10)
    rows = [row_params(0.8, NO_CUT, s % 7, s // 7 % 50, s // 350) for s in range(20_000)]
    drawn = sample(logits.expand(len(rows), -1), rows)
    expected = torch.softmax(logits.double() / 0.8, -1) * len(rows)
    counts = torch.bincount(drawn.tokens, minlength=10).double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 33.7


def test_noise_is_standard_gumbel_and_independent_between_keys() -> None:
    noise = gumbel_noise(1, 0, 0, 200_000)
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(np.pi**2 / 6, abs=0.03)
    for other in (gumbel_noise(2, 0, 0, 200_000), gumbel_noise(1, 1, 0, 200_000),
                  gumbel_noise(1, 0, 1, 200_000)):  # fmt: skip
        assert abs(float(np.corrcoef(noise, other)[0, 1])) < 0.01
    assert torch.equal(noise[:1000], gumbel_noise(1, 0, 0, 1000))


def test_noise_takes_seeds_of_the_whole_range() -> None:
    assert torch.isfinite(gumbel_noise(2**64 - 1, 1023, 2**31, 101)).all()


def test_greedy_ties_go_to_the_lowest_id() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 0.0, 1.0]])
    assert lowest_argmax(values).tolist() == [1, 0]


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.5, 0.8, 0.999999, 1.0])
@pytest.mark.parametrize("top_k", [-1, 1, 3, 50])
def test_top_k_and_top_p_keep_what_the_definition_keeps(top_k: int, top_p: float) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1))
    logits[5] = logits[9]
    kept = keep_mask(torch.log_softmax(logits, -1), top_k, top_p)
    expected = expected_distribution(logits.double(), 1.0, top_k, top_p) > 0
    assert torch.equal(kept, expected)


def test_reported_logprobs_obey_the_temperature() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(2))
    at = {
        t: sample(logits, [row_params(t, NO_CUT, 0, 0, 0)]).distribution(0)[0]
        for t in (1.0, 0.5, 2.0)
    }
    for temperature, logprobs in at.items():
        ours = logprobs[3] - logprobs[8]
        assert float(ours) == pytest.approx(float(at[1.0][3] - at[1.0][8]) / temperature, rel=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_draw_does_not_depend_on_the_rows_beside_it(temperature: float) -> None:
    logits = 4 * torch.randn(64, 49152, generator=torch.Generator().manual_seed(4))
    rows = [row_params(temperature, NO_CUT, i, 0, 5) for i in range(64)]
    whole = sample(logits, rows)
    for size in (1, 3, 17):
        for start in range(0, 64 - size, size):
            beside = slice(start, start + size)
            part = sample(logits[beside], rows[beside])
            assert torch.equal(part.tokens, whole.tokens[beside])
            assert torch.equal(part.logprobs, whole.logprobs[beside])


def test_reported_logprobs_are_unbiased_over_a_large_vocabulary() -> None:
    logits = 4 * torch.randn(8, 49152, generator=torch.Generator().manual_seed(3))
    drawn = sample(logits, [row_params(1.0, NO_CUT, i, 0, 0) for i in range(8)])
    exact = torch.log_softmax(logits.double(), -1).gather(-1, drawn.tokens[:, None])[:, 0]
    assert float((drawn.logprobs.double() - exact).abs().max()) < 4e-6


# ---- the compiled look at the logits


@pytest.fixture(scope="module")
def team() -> Iterator[bindings.Team]:
    if compiler.library() is None:
        pytest.skip("there is no C compiler here")
    made = bindings.Team(2)
    yield made
    made.end()


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("spread", [0.0, 0.1, 4.0, 40.0])
@pytest.mark.parametrize("cut", [(-1, 1.0), (1, 1.0), (40, 1.0), (-1, 0.9), (-1, 1e-9), (300, 0.5)])
def test_the_compiled_draw_is_the_plain_one(
    team: bindings.Team, temperature: float, spread: float, cut: tuple[int, float]
) -> None:
    logits = spread * torch.randn(60, 5003, generator=torch.Generator().manual_seed(7))
    logits[:, 17] = logits[:, 4000]  # ties
    rows = [row_params(temperature, cut, 2**64 - 1 - i, i % 5, 3 * i) for i in range(60)]
    plain, fast = sample(logits, rows), sample(logits, rows, partial(bindings.scan, team))
    assert torch.equal(fast.tokens, plain.tokens)
    limit = 4e-6 + float(plain.norms.abs().max()) * 2**-23  # norms of the plain one are float32
    np.testing.assert_allclose(fast.logprobs, plain.logprobs, rtol=0, atol=limit)
    np.testing.assert_allclose(fast.distribution(3), plain.distribution(3), rtol=1e-6, atol=1e-5)


def test_equal_scores_go_to_the_lowest_id_in_the_compiled_draw_too(team: bindings.Team) -> None:
    logits = torch.zeros(2, 100)
    logits[0, 40], logits[0, 60] = 5.0, 5.0
    rows = [row_params(0.0, NO_CUT, 0, 0, 0)] * 2
    assert sample(logits, rows, partial(bindings.scan, team)).tokens.tolist() == [40, 0]


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.9, 0.999999, 1.0])
@pytest.mark.parametrize("top_k", [-1, 1, 7, 999, 5000])
def test_the_compiled_cut_keeps_what_the_definition_keeps(
    team: bindings.Team, top_k: int, top_p: float, spread: float
) -> None:
    """By the mass of what is kept, to nine digits: a token more or less would change it. Without a
    cut the sum is float32's."""
    digits = 1e-9 if top_k > 0 or top_p < 1.0 else 1e-6
    logits = (spread * torch.randn(20, 1000, generator=torch.Generator().manual_seed(8))).round(
        decimals=1
    )
    logits[:, 5] = float("-inf")
    rows = [row_params(0.8, (top_k, top_p), i, 0, i) for i in range(20)]
    found = bindings.scan(team, logits, rows)
    for i, row in enumerate(warp(logits, rows).double()):
        assert found.norm[i] == pytest.approx(float(torch.logsumexp(row, -1)), abs=digits)
    drawn = sample(logits, rows, partial(bindings.scan, team))
    assert torch.isfinite(drawn.distributions().gather(-1, drawn.tokens[:, None])).all()


def test_a_row_drawn_the_plain_way_changes_none_beside_it(team: bindings.Team) -> None:
    logits = 3 * torch.randn(3, 5000, generator=torch.Generator().manual_seed(9))
    logits[1] = 0.0
    rows = [row_params(t, NO_CUT, 1, 0, 0) for t in (0.7, 1000.0, 0.7)]
    scan = partial(bindings.scan, team)
    together = sample(logits, rows, scan)
    for i in range(3):
        alone = sample(logits[i : i + 1], rows[i : i + 1], scan)
        assert together.tokens[i] == alone.tokens[0]
        assert together.logprobs[i] == alone.logprobs[0]


def test_few_tokens_are_left_to_score(team: bindings.Team) -> None:
    logits = 4 * torch.randn(64, 49152, generator=torch.Generator().manual_seed(4))
    rows = [row_params(1.0, NO_CUT, i, 0, 5) for i in range(64)]
    found = bindings.scan(team, logits, rows)
    assert found.count.min() >= 1
    assert found.count.mean() < 20


@pytest.mark.parametrize("cut", [NO_CUT, (700, 1.0)])
@pytest.mark.parametrize("size", [1, 9, 1500, 49155])
def test_candidates_come_with_the_random_numbers_that_numpy_makes(
    team: bindings.Team, size: int, cut: tuple[int, float]
) -> None:
    logits = 0.1 * torch.randn(4, size, generator=torch.Generator().manual_seed(13))
    rows = [row_params(1.0, cut, 2**64 - 7 * i, 2**63 + i, 2**40 + i) for i in range(1, 5)]
    found = bindings.scan(team, logits, rows)
    for i, row in enumerate(rows):
        key = np.array([row.params.seed, row.sample_index], np.uint64)
        counter = np.array([0, row.position, 0, 0], np.uint64)
        raw = np.random.Philox(key=key, counter=counter).random_raw(size // 2 + 1)
        words, ids = raw.view(np.uint32), found.ids[i, : found.count[i]]
        assert len(ids) > 0
        assert np.array_equal(found.words[i, : len(ids)], words[ids])


def test_a_flat_distribution_with_too_many_candidates_is_drawn_the_plain_way(
    team: bindings.Team,
) -> None:
    logits = torch.full((1, 5000), -50.0)
    logits[0, :4000] = 700.0  # at temperature 100 equal, and far above all noise
    rows = [row_params(100.0, NO_CUT, 1, 0, 0)]
    assert torch.equal(
        sample(logits, rows, partial(bindings.scan, team)).tokens, sample(logits, rows).tokens
    )


# ---- the compiled log of a sum of exp


@pytest.mark.parametrize("size", [1, 5, 1023, 1024, 1025, 49152])
def test_norms_of_scored_rows_are_those_of_drawn_ones(team: bindings.Team, size: int) -> None:
    logits = 4 * torch.randn(9, size, generator=torch.Generator().manual_seed(10))
    norms = bindings.log_sum_exp(team, logits)
    rows = [row_params(float(i % 2), NO_CUT, i, 0, 5) for i in range(9)]
    assert np.array_equal(norms.numpy(), bindings.scan(team, logits, rows).norm)
    for i in range(9):
        assert norms[i] == bindings.log_sum_exp(team, logits[i : i + 1])[0]
    np.testing.assert_allclose(norms, torch.logsumexp(logits.double(), -1), rtol=0, atol=1e-6)


def test_norms_of_masked_rows_and_of_rows_that_are_no_numbers(team: bindings.Team) -> None:
    logits = 4 * torch.randn(4, 3000, generator=torch.Generator().manual_seed(11))
    logits[0, :2100] = float("-inf")
    logits[1] = 1e4
    logits[2, 2500] = float("nan")
    norms = bindings.log_sum_exp(team, logits)
    exact = torch.logsumexp(logits.double(), -1)
    np.testing.assert_allclose(norms, exact, rtol=1e-9, atol=1e-6)
    assert norms[2].isnan()


def test_the_k_best_are_those_of_the_scored_row(team: bindings.Team) -> None:
    """A sampled token's alternatives, where its row was too flat to be scanned too."""
    logits = 4 * torch.randn(3, 5000, generator=torch.Generator().manual_seed(12))
    logits[1] = 0.0
    drawn = sample(
        logits, [row_params(1.0, NO_CUT, i, 0, 0) for i in range(3)], partial(bindings.scan, team)
    )
    scores = logprobs_of(logits, bindings.log_sum_exp(team, logits)[:, None])
    assert torch.equal(drawn.distributions(), scores)
    assert torch.equal(drawn.logprobs, scores.gather(-1, drawn.tokens[:, None])[:, 0])
