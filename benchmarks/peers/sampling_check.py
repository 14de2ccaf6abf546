"""Whether sampled tokens are right, by transformers in float32 on a file's weights, not rounded
(`lib.accuracy`).

A fast wrong answer is worth nothing: tokens drawn at temperature 1 must be as likely as draws from
the distribution are, and greedy tokens the likeliest ones but for rounding. How much a contender's
rounding does to its greedy tokens is reported, and no reason to leave it out.

Axes: T tokens of a sequence, V vocabulary.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.lib.accuracy import FullPrecision, chosen

NOT_ROUNDING_NATS = 2.0
"""A greedy token that is less likely by more than this than the likeliest one is no matter of
rounding: the contender computes something else. In bfloat16 0.4 has been seen."""
SAMPLED_Z = 5.0
"""Standard deviations by which a sample's log-probability may be off its expectation."""


@dataclass(frozen=True)
class GreedyCheck:
    """A contender's greedy tokens, each judged after those that it chose before. differing: how
    many are not the likeliest. first: the place in its sequence of the earliest one of these, from
    1. gap_nats: the most that one is less likely than the likeliest."""

    tokens: int
    differing: int
    first: int | None
    gap_nats: float

    @classmethod
    def of(cls, gaps: Iterable[NDArray[np.float64]]) -> "GreedyCheck":
        """gaps: of each sequence, as `Reference.greedy_gaps` has them; of one at least."""
        sequences = list(gaps)
        places = [int(place) + 1 for gap in sequences for place in np.flatnonzero(gap > 0)]
        largest = max(float(gap.max()) for gap in sequences)
        first = min(places) if places else None
        return cls(sum(map(len, sequences)), len(places), first, largest)


class Reference:
    def __init__(self, folder: Path):
        """folder: a Hugging Face folder with float32 weights."""
        self._exact = FullPrecision(folder)
        self.parameters = self._exact.parameters
        self.unembedding = self._exact.unembedding

    def greedy_gaps(self, prompt: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float64]:
        """(T,): how much less likely each token is than the likeliest one in its place, in nats."""
        log_p = self._exact.log_distribution(prompt, tokens)
        return (log_p.max(-1).values - chosen(log_p, tokens)).numpy()

    @torch.inference_mode()
    def sampled_z(self, prompt: Sequence[int], tokens: Sequence[int]) -> float:
        """How many standard deviations the tokens' log-probability is off its expectation."""
        log_p = self._exact.log_distribution(prompt, tokens)
        probabilities = log_p.exp()
        mean = (probabilities * log_p).sum(-1)
        variance = (probabilities * log_p.pow(2)).sum(-1) - mean.pow(2)
        excess = chosen(log_p, tokens).sum() - mean.sum()
        return float(excess) / max(math.sqrt(float(variance.sum())), 1e-6)

    def fault(
        self, prompts: Sequence[Sequence[int]], samples: Sequence[Sequence[int]]
    ) -> str | None:
        """What is wrong with samples[i], drawn at temperature 1 after prompts[i]; None: nothing."""
        for prompt, tokens in zip(prompts, samples, strict=True):
            if abs(z := self.sampled_z(prompt, tokens)) > SAMPLED_Z:
                return f"samples are {z:.1f} standard deviations off the distribution"
        return None
