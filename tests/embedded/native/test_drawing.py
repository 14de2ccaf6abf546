"""Tokens that a pass draws without keeping logits, against those that are drawn from the logits:
the same tokens, and the same log-probabilities bit for bit."""

import ctypes as c
import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch

from tests.embedded.native.test_scores import HIDDEN, NUM_ROWS, SIZES, Unembedding
from tinkercloud.core.types import SamplingParams
from tinkercloud.decoding.sampler import Candidates, Drawn, RowParams, sample, sample_candidates
from tinkercloud.embedded.native import compiler
from tinkercloud.embedded.native.bindings import scan
from tinkercloud.embedded.native.drawing import Drawing, DrawnFrom
from tinkercloud.embedded.native.train_bindings import training_team

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="there is no C compiler")

TEMPERATURES = (1.0, 0.0, 0.7, 1.0, 30.0)


def params(num: int, seed: int = 0) -> list[RowParams]:
    """Of every temperature; at 30 any token of the vocabulary may be drawn."""
    return [
        RowParams(
            SamplingParams(1, temperature=TEMPERATURES[i % len(TEMPERATURES)], seed=seed + i // 3),
            sample_index=i % 3,
            position=i * 17,
        )
        for i in range(num)
    ]


def found_by_pass(
    unembedding: Unembedding,
    rows: Sequence[int],
    wanted: list[RowParams],
    keep_every: int = 0,
    drafted: Sequence[int] | None = None,
) -> Candidates:
    """keep_every: of so many rows the first one's logits are kept; 0: none. drafted: a token of
    each row, or -1."""
    keeps = np.arange(len(rows)) % keep_every == 0 if keep_every else np.zeros(len(rows), bool)
    tokens = np.full(len(rows), -1) if drafted is None else np.array(drafted)
    drawn_from = DrawnFrom(np.array(rows, np.int64), wanted, keeps, tokens)
    drawing = Drawing(drawn_from, torch.empty(drawn_from.num_kept, unembedding.vocab_size))
    last = unembedding.layers._config.num_layers
    unembedding.layers._run(
        first_layer=last,
        end_layer=last,
        hidden=unembedding.hidden.data_ptr(),
        drawing=c.pointer(drawing.request),
    )
    return drawing.candidates


def drawn_from_logits(
    unembedding: Unembedding, rows: Sequence[int], wanted: list[RowParams]
) -> Drawn:
    logits = torch.empty(len(rows), unembedding.vocab_size)
    unembedding.layers.logits(unembedding.hidden, np.array(rows, np.int64), logits)
    with training_team() as team:
        scanned = sample(logits, wanted, partial(scan, team))
    assert torch.equal(scanned.tokens, sample(logits, wanted).tokens)
    return scanned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("float32", "bfloat16"))
@pytest.mark.parametrize("vocab_size", SIZES)
def test_a_pass_draws_what_is_drawn_from_the_logits(vocab_size: int, dtype: torch.dtype) -> None:
    unembedding = Unembedding(vocab_size, dtype, [(5, 17), (40, 280)])
    for rows in (range(NUM_ROWS), [0], [16, 17], range(0, 299, 3), range(100, 165)):
        wanted = params(len(rows), seed=vocab_size)
        found = found_by_pass(unembedding, rows, wanted)
        assert (found.count > 0).all()
        drawn = sample_candidates(found, wanted)
        expected = drawn_from_logits(unembedding, rows, wanted)
        assert torch.equal(drawn.tokens, expected.tokens)
        assert torch.equal(drawn.norms, expected.norms)
        assert torch.equal(drawn.logprobs, expected.logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("float32", "bfloat16"))
@pytest.mark.parametrize("keep_every", [1, 3])
def test_logits_that_are_kept_are_those_of_their_rows(dtype: torch.dtype, keep_every: int) -> None:
    unembedding = Unembedding(3003, dtype, [(5, 17), (40, 280)])
    rows, wanted = range(0, 200, 2), params(100)
    found = found_by_pass(unembedding, rows, wanted, keep_every)
    expected = drawn_from_logits(unembedding, rows, wanted)
    assert torch.equal(found.logits, expected.logits[::keep_every])
    drawn = sample_candidates(found, wanted)
    assert torch.equal(drawn.tokens, expected.tokens)
    assert torch.equal(drawn.logprobs, expected.logprobs)
    some, places = [0, 2 * keep_every, 99], [0, 2, 33 if keep_every == 3 else -1]
    drawn = sample_candidates(found.of(some), [wanted[row] for row in some], places)
    assert torch.equal(drawn.tokens, expected.tokens[some])
    for row, of_all in enumerate(some):
        if places[row] < 0:
            with pytest.raises(AssertionError, match="not kept"):
                drawn.distribution(row)
        else:
            assert torch.equal(drawn.distribution(row), expected.distribution(of_all))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("float32", "bfloat16"))
def test_a_pass_tells_how_likely_drafted_tokens_were(dtype: torch.dtype) -> None:
    """Without keeping logits, and of those drafted alone; at temperature 0 nothing is likely."""
    unembedding = Unembedding(3003, dtype, [(5, 17), (40, 280)])
    rows, wanted = range(0, 200, 2), params(100)
    drafted = [-1 if row % 7 == 3 else 37 * row % 3003 for row in range(100)]
    drafted[0], drafted[5] = 0, 3002
    drawn = sample_candidates(found_by_pass(unembedding, rows, wanted, drafted=drafted), wanted)
    expected = drawn_from_logits(unembedding, rows, wanted)
    assert torch.equal(drawn.tokens, expected.tokens)
    chances = drawn.chances(range(100), drafted)
    of_logits = expected.distributions().exp()
    for row, token in enumerate(drafted):
        if token < 0 or wanted[row].is_greedy:
            assert math.isnan(chances[row])
        else:
            assert chances[row] == pytest.approx(float(of_logits[row, token]), rel=1e-5)
            assert chances[row] == pytest.approx(expected.chances([row], [token])[0], rel=1e-12)
    assert drawn.chances([8, 9, 10], drafted[8:10]) == chances[8:10]


def test_of_capped_logits_too() -> None:
    unembedding = Unembedding(3003, torch.float32, [(5, 17)], logit_cap=3.0)
    wanted = params(NUM_ROWS)
    drawn = sample_candidates(found_by_pass(unembedding, range(NUM_ROWS), wanted), wanted)
    expected = drawn_from_logits(unembedding, range(NUM_ROWS), wanted)
    assert torch.equal(drawn.tokens, expected.tokens)
    assert torch.equal(drawn.logprobs, expected.logprobs)


def test_where_all_tokens_weigh_the_same_the_noise_decides() -> None:
    unembedding = Unembedding(3003, torch.float32, [])
    unembedding.hidden = torch.zeros(NUM_ROWS, HIDDEN)
    wanted = params(NUM_ROWS)
    drawn = sample_candidates(found_by_pass(unembedding, range(NUM_ROWS), wanted), wanted)
    expected = drawn_from_logits(unembedding, range(NUM_ROWS), wanted)
    assert torch.equal(drawn.tokens, expected.tokens)
    assert drawn.tokens[1] == 0, "the lowest id among equals, at temperature 0"


def test_what_is_no_number_is_left_to_the_logits() -> None:
    unembedding = Unembedding(3003, torch.float32, [])
    unembedding.hidden[7] = torch.nan
    found = found_by_pass(unembedding, range(10), params(10))
    assert found.count[7] == 0
    assert (np.delete(found.count, 7) > 0).all()
