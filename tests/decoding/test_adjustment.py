"""min-p and penalties against slow references, and what they leave alone."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.decoding.rows import row_params
from tinkercloud.decoding import device_scan
from tinkercloud.decoding.adjustment import Adjustment, adjustment_of
from tinkercloud.decoding.sampler import RowParams, Scan, gumbel_noise, sample, warp
from tinkercloud.embedded.native import bindings, compiler

SIZE = 500


@pytest.fixture(params=["plain", "compiled", "device"])
def scan(request: pytest.FixtureRequest) -> Iterator[Scan | None]:
    if request.param == "compiled" and compiler.library() is None:
        pytest.skip("there is no C compiler here")
    if request.param != "compiled":
        yield device_scan.scan if request.param == "device" else None
        return
    team = bindings.Team(2)
    yield partial(bindings.scan, team)
    team.end()


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(num_rows, SIZE, generator=torch.Generator().manual_seed(seed))


def row(
    sampled: tuple[int, ...] = (), allowed: torch.Tensor | None = None, **options: float
) -> RowParams:
    plain = row_params(options.pop("temperature", 1.0), seed=int(options.pop("seed", 0)))
    params = replace(plain.params, **options)
    return replace(plain, params=params, adjustment=adjustment_of(params, sampled, allowed))


def expected(logits: NDArray[np.float64], drawn_with: RowParams) -> NDArray[np.float64]:
    """Log-probabilities (V,), a token at a time, as the definitions read."""
    params, adjustment = drawn_with.params, drawn_with.adjustment
    sampled = list(adjustment.sampled) if adjustment is not None else []
    out = []
    for token, logit in enumerate(logits.tolist()):
        count = sampled.count(token)
        logit -= count * params.frequency_penalty + (count > 0) * params.presence_penalty
        allowed = adjustment.allowed if adjustment is not None else None
        out.append(logit if allowed is None or allowed[token] else -math.inf)
    scores = np.array(out) / (params.temperature or 1.0)
    probs = np.exp(scores - scores.max())
    if params.temperature:
        probs[probs < params.min_p * probs.max()] = 0
    with np.errstate(divide="ignore"):
        return np.log(probs / probs.sum())


CASES = [
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 0.3, "temperature": 2.0},
    {"min_p": 0.3, "temperature": 0.0},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7, "temperature": 0.5},
    {"presence_penalty": 2.0, "frequency_penalty": 1.0, "temperature": 0.0},
    {"presence_penalty": -1.0, "frequency_penalty": 0.5, "min_p": 0.1},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("is_masked", [False, True])
def test_tokens_and_logprobs_are_those_of_the_slow_reference(
    scan: Scan | None, options: dict[str, float], is_masked: bool
) -> None:
    logits = random_logits(6)
    allowed = torch.arange(SIZE) % 3 == 1 if is_masked else None
    sampled = (7, 7, 7, 300, 41, 41, int(logits[2].argmax()), int(logits[3].argmax()))
    rows = [row(sampled, allowed, seed=i, **options) for i in range(6)]
    drawn = sample(logits, rows, scan)
    for i, drawn_with in enumerate(rows):
        distribution = expected(logits[i].double().numpy(), drawn_with)
        scores = distribution
        if not drawn_with.is_greedy:
            scores = distribution + gumbel_noise(i, 0, 0, SIZE).double().numpy()
        token = int(drawn.tokens[i])
        assert token == int(np.argmax(scores))
        assert float(drawn.logprobs[i]) == pytest.approx(distribution[token], abs=1e-5)
        np.testing.assert_allclose(drawn.distribution(i)[0], distribution, atol=1e-5)


def test_rows_beside_adjusted_ones_keep_their_bits(scan: Scan | None) -> None:
    logits = random_logits(5, seed=1)
    plain = [row_params(t, cut, seed=i) for i, (t, cut) in enumerate(PLAIN)]
    alone = sample(logits, plain, scan)
    mixed = list(plain)
    mixed[1] = row((5, 6), min_p=0.2, presence_penalty=1.0)
    mixed[3] = row((), torch.arange(SIZE) < 10)
    before = logits.clone()
    drawn = sample(logits, mixed, scan)
    assert torch.equal(logits, before)
    for i in (0, 2, 4):
        assert drawn.tokens[i] == alone.tokens[i]
        assert drawn.logprobs[i] == alone.logprobs[i]
    assert drawn.tokens[3] < 10


PLAIN = [(1.0, (-1, 1.0)), (1.0, (-1, 1.0)), (0.7, (20, 0.9)), (1.0, (-1, 1.0)), (0.0, (-1, 1.0))]


@pytest.mark.parametrize("min_p", [0.01, 0.2, 0.9])
@pytest.mark.parametrize(("top_k", "top_p"), [(SIZE, 1.0), (20, 1.0), (SIZE, 0.7), (30, 0.8)])
def test_min_p_is_that_of_transformers(top_k: int, top_p: float, min_p: float) -> None:
    logits, temperature = random_logits(8, seed=2), 1.3
    theirs = TemperatureLogitsWarper(temperature)(None, logits.clone())
    for warper in (TopKLogitsWarper(top_k), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)):
        theirs = warper(None, theirs)
    rows = [row(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)] * 8
    assert torch.equal(warp(logits, rows).isfinite(), theirs.isfinite())


def test_a_vocabulary_beyond_the_mask_is_not_allowed() -> None:
    """Some networks have more rows than their tokenizer has tokens."""
    params = row_params().params
    logits = Adjustment(params, (), torch.ones(4, dtype=torch.bool)).apply(torch.zeros(6))
    assert logits.tolist() == [0.0] * 4 + [float("-inf")] * 2
