"""Verification of a draft by scores: which of its tokens the target samples itself.

Greedy: a drafted token is accepted where it is the target's likeliest. At temperature 1: with the
probability that the target gives it, and where it is rejected the next token is drawn by the target
among the others, which together is the target's own distribution whatever was drafted (the rule for
drafts without a distribution of their own, Leviathan et al. 2211.17192).

Axes: K drafted tokens.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinkercloud.chat.requests import SamplingOptions


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """prompt, of at least one token, and drafted (K,): ids of the target's own vocabulary.
    num_tokens: to be sampled after all of them, the first of them another one than `excluded`."""

    prompt: tuple[int, ...]
    drafted: tuple[int, ...]
    sampling: SamplingOptions
    num_tokens: int = 1
    excluded: int | None = None

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.drafted]


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens: what a server sampled, with the one that ended it where has_ended."""

    tokens: tuple[int, ...]
    has_ended: bool


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """logprob: of a drafted token at its place. likeliest: of all tokens there; None: two have the
    same log-probability, and which of them the target would sample is not known."""

    logprob: float
    likeliest: int | None


@dataclass(frozen=True, slots=True)
class Scores:
    """drafted (K - num_missing,), of all drafted tokens but the first. after: what the target
    sampled behind the whole draft. num_cached: tokens that it did not compute for it."""

    drafted: tuple[ScoredToken, ...]
    after: Sampled
    num_missing: int = 0
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class Verified:
    """tokens: the accepted ones, and mostly one of the target's own. Without that one, the target
    must be asked to sample: until it is another one than `rejected`, where that is given.
    num_requests: made for it. is_sampled: the target could not score the draft, and its token is
    sampled without."""

    tokens: tuple[int, ...]
    num_accepted: int
    has_ended: bool = False
    rejected: int | None = None
    num_requests: int = 1
    is_sampled: bool = False


def verify_greedily(
    drafted: Sequence[int], scores: Scores, is_text: Callable[[int], bool]
) -> Verified:
    """is_text: False for a token that may end a sample: whether it does is known of those alone
    that the target samples itself."""
    for place, (token, scored) in enumerate(zip(drafted, scores.drafted, strict=True)):
        best = scored.likeliest
        if best is None or (best != token and not is_text(best)):
            return Verified(tuple(drafted[:place]), place)
        if best != token:
            return Verified((*drafted[:place], best), place)
    return _accepted(drafted, scores)


def verify_by_chance(drafted: Sequence[int], scores: Scores, coins: random.Random) -> Verified:
    for place, (token, scored) in enumerate(zip(drafted, scores.drafted, strict=True)):
        if coins.random() >= math.exp(scored.logprob):
            return Verified(tuple(drafted[:place]), place, rejected=token)
    return _accepted(drafted, scores)


def _accepted(drafted: Sequence[int], scores: Scores) -> Verified:
    after = scores.after
    return Verified((*drafted, *after.tokens), len(drafted), after.has_ended)
