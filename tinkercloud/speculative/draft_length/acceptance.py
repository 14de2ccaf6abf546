"""How likely drafted tokens are to be accepted, as counted: a drafter's confidence is not
calibrated.

A token's rate is that of its depth and its bucket of confidence, given that those before it were
accepted. With few counts it leans on what was seen of the bucket there and deeper, that on what was
seen one place before and deeper, and in the first place on the drafter's rate: a draft that is
right twice is mostly right a third time, and what is seldom verified would else be taken for what
fails in the first place. Old counts fade.
A group of samples whose drafts are accepted more often than expected, or less, has a factor.

Axes: B sequences, D depths, C buckets of confidence.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np
from numpy.typing import NDArray

from tinkercloud.speculative.draft_length.rounds import Round

Array = NDArray[np.float64]
EDGES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.92, 0.97)
BUCKETS = len(EDGES) + 1
UNCOUNTED = np.array((1 / 6, 1 / 2, 5 / 6) + (1.0,) * (BUCKETS - 3))
"""Of each bucket, until it is counted: how often its tokens are accepted, as a share of the overall
rate. Of a suffix drafter's first tokens with SmolLM2 there were accepted, in prose and structured
text together, 0.10 of those below 0.4, 0.57 below 0.6, and 0.73 above."""
DEEPER_LEANING = 2.0
# After a change of weights: what counts weigh, and the tokens that they count for, at most.
DOUBTED, DOUBTED_TOKENS = 0.25, 16.0
Counts = tuple[float, float, float]
NOTHING: Counts = (0.0, 0.0, 0.0)
MOST_SHIFT, BISECTIONS = 10.0, 24  # of log odds


@dataclass(frozen=True, slots=True)
class Prior:
    """rate: of a new drafter; hopeful, else it is never tried. tokens: that this counts for.
    leaning: tokens that the wider rate counts for. memory: tokens after which a count weighs 1 / e.
    num_groups: remembered at most. expected: tokens that a rate counts for which is not counted
    but expected of a new draft."""

    rate: float = 0.6
    tokens: float = 4.0
    leaning: float = 8.0
    memory: float = 2000.0
    num_groups: int = 4096
    expected: float = 64.0


class Acceptance:
    """Of one drafter."""

    def __init__(self, max_depth: int = 8, prior: Prior | None = None) -> None:
        self._prior, self._depth = prior or Prior(), max_depth
        # All that is counted is one array, since a round's learning is mostly the calls that it
        # makes while the target's weights have every cache.
        num_tokens = max_depth * BUCKETS
        self._counts = np.zeros(3 * num_tokens + 3 * (max_depth + 1))
        # seen: tokens that came, verified or not
        tokens = self._counts[: 3 * num_tokens].reshape(3, max_depth, BUCKETS)
        self._judged, self._accepted, self._seen = self._tokens = tokens
        # Sequences, each at its last depth: of those asked for it and verified up to it, of those
        # verified, and of those asked for it whose draft came as far as the depth before.
        self._ends = self._counts[3 * num_tokens :].reshape(3, max_depth + 1)
        self._accepted_at, self._seen_at = num_tokens, 2 * num_tokens  # in `_counts`
        self._ends_at = [3 * num_tokens + i * (max_depth + 1) for i in range(3)]
        # Of each group: tokens with a verdict, those of them expected to be accepted, and accepted.
        self._groups: OrderedDict[Hashable, Counts] = OrderedDict()
        self._all_groups = NOTHING
        self._fitted_rates: Array | None = None  # of the counts as they are
        self._fitted_list: list[list[float]] | None = None
        self.num_known = 0.0
        """Tokens with a verdict, less those that have faded."""

    @property
    def overall(self) -> float:
        """The rate of all drafted tokens, given that those before were accepted."""
        prior = self._prior
        accepted = self._accepted.sum() + prior.rate * prior.tokens
        return float(accepted / (self.num_known + prior.tokens))

    def survivals(
        self, confidences: Sequence[Sequence[float]], groups: Sequence[Hashable] = ()
    ) -> list[list[float]]:
        """Of each draft's tokens: the chance that this one and all before it are accepted, by what
        is counted."""
        by_depth = self._listed_rates
        survivals = list[list[float]]()
        for draft, factor in zip(confidences, self._factors(len(confidences), groups), strict=True):
            chance, chances = 1.0, list[float]()
            for rates, confidence in zip(by_depth, draft, strict=False):
                rate = rates[bisect_right(EDGES, confidence)]
                chance *= factor * rate if factor <= 1.0 else 1.0 - (1.0 - rate) / factor
                chances.append(chance)
            survivals.append(chances)
        return survivals

    def forecast(self, num_sequences: int, groups: Sequence[Hashable] = ()) -> tuple[Array, Array]:
        """Before drafting: the chances (B, D) that a token asked for will be verified, and that it
        will be accepted. Drafts come shorter than asked, and those that do not pay are not
        verified."""
        lean = self._prior.leaning
        requested, verified, _ = self._reached()
        shares = (verified + lean) / (requested + lean)
        by_depth = self._judged.sum(1), self._accepted.sum(1)
        rates = (by_depth[1] + lean * self.overall) / (by_depth[0] + lean)
        rows = np.tile(np.cumprod(shares, dtype=np.float64), (num_sequences, 1))
        factors = np.array(self._factors(num_sequences, groups))
        rates = _multiplied(rates, factors[:, None])
        return rows, rows * np.cumprod(rates, 1)

    def forecast_chosen(
        self, num_sequences: int, groups: Sequence[Hashable], least: float
    ) -> tuple[Array, Array]:
        """`forecast` where a token is verified as long as its own rate and those of all before it
        are `least` or more: of drafts that are often sure and often not, long ones bring most."""
        lean = self._prior.leaning
        factors = np.array(self._factors(num_sequences, groups))
        came = (self._seen.sum(1) + lean) / (self._reached()[2] + lean)
        rates = _multiplied(self._rates, factors[:, None, None])
        chosen = self._shares() * (rates >= least) * np.minimum(came, 1.0)[:, None]
        return np.cumprod(chosen.sum(-1), 1), np.cumprod((chosen * rates).sum(-1), 1)

    def sure_above(self, least: float) -> float:
        """The confidence below which first tokens are accepted at less than this rate, as far as
        some were seen."""
        seen = np.flatnonzero(self._judged[0] >= 1.0)
        sure = seen[self._rates[0, seen] >= least]
        return float(EDGES[sure[0] - 1]) if len(sure) and sure[0] > seen[0] else 0.0

    def learn(self, rounds: Sequence[Round]) -> None:
        depth, counted, num_judged = self._depth, list[int](), 0  # places in `_counts`
        requested_at, verified_at, asked_at = self._ends_at
        for one in rounds:
            drafts = zip(one.confidences, one.limits, one.verified, strict=True)
            verdicts = zip(one.num_compared, one.num_right, strict=True)
            groups = one.groups or (None,) * one.num_sequences
            num_groups = len(set(groups))
            for (draft, limit, verified), (compared, right), group in zip(
                drafts, verdicts, groups, strict=True
            ):
                places = [i * BUCKETS + bisect_right(EDGES, c) for i, c in enumerate(draft[:depth])]
                judged = places[:compared]
                counted += judged
                counted += [self._accepted_at + place for place in places[:right]]
                # What is not verified is seen too, or a drafter that was bad once would stay so for
                # good.
                counted += [self._seen_at + place for place in places]
                # A draft that ends with an unsure token may have had more to say.
                ends = bool(draft) and draft[-1] < one.unsure_below
                asked = min(limit, depth, min(len(draft), depth) + 1 - ends)
                counted += (
                    requested_at + min(limit, depth, verified + 1),
                    verified_at + min(verified, depth),
                    asked_at + asked,
                )
                num_judged += len(judged)
                if group is not None and judged:
                    self._learn_group(group, num_groups, judged, min(right, depth))
        self.age(exp(-num_judged / self._prior.memory))
        self._counts += np.bincount(counted, minlength=self._counts.size)
        self.num_known += num_judged

    def age(self, factor: float) -> None:
        """What was counted so far weighs `factor` of what it did."""
        self._counts *= factor
        self.num_known *= factor
        self._fitted_rates = self._fitted_list = None

    def doubt(self) -> None:
        """The target or its draft has other weights: what was counted is worth a share of what it
        was, and no more than some tokens. Many samples are soon counted anew; what they had said
        before would outweigh that for most of an epoch."""
        self.age(min(DOUBTED, DOUBTED_TOKENS / max(self.num_known, 1.0)))

    def expect(self, rates: Sequence[float]) -> None:
        """Of another draft, by depth, in place of what was counted of the one before; beyond the
        last of them tokens are accepted as often as there. Which confidences are better than others
        is taken to be as it was."""
        depths = np.minimum(np.arange(len(self._judged)), len(rates) - 1)
        shares = self._shares()
        expected = _with_means(self._rates, shares, np.array(rates, np.float64)[depths])
        self._judged[:] = self._prior.expected * shares
        self._accepted[:] = self._judged * expected
        self.num_known = float(self._judged.sum())
        self._ends[:2] = 0.0
        self._ends[:2, -1] = self._prior.expected  # asked for and verified to the last depth
        self._groups.clear()
        self._all_groups = NOTHING
        self._fitted_rates = self._fitted_list = None

    def _reached(self) -> Array:
        """(3, D): sequences whose end, as `_ends` counts them, is at this depth or behind it."""
        return np.cumsum(self._ends[:, :0:-1], 1)[:, ::-1]

    @property
    def _rates(self) -> Array:
        """(D, C)"""
        if self._fitted_rates is None:
            self._fitted_rates = self._fitted()
        return self._fitted_rates

    @property
    def _listed_rates(self) -> list[list[float]]:
        listed = self._fitted_list
        if listed is None:
            listed = self._fitted_list = self._rates.tolist()
        return listed

    def _fitted(self) -> Array:
        lean = self._prior.leaning
        deeper_lean = DEEPER_LEANING * lean  # few counts of many places are no reason to differ
        judged, accepted = np.cumsum(self._tokens[:2, ::-1], 1)[:, ::-1]
        weights = judged + deeper_lean
        # Of each depth: what is counted, and its leaning times that of the depth before. For all
        # depths at once, since a loop over them would take most of a round's decision.
        leaning = np.cumprod(deeper_lean / weights, 0)
        counted = np.cumsum(accepted / (weights * leaning), 0)
        by_depth = leaning * (self.overall * UNCOUNTED + counted)
        return (self._accepted + lean * by_depth) / (self._judged + lean)

    def _shares(self) -> Array:
        """(D, C): of the tokens that come at a depth, those of each confidence. With few counts it
        leans on the depths before."""
        lean, shares = self._prior.leaning, np.empty_like(self._seen)
        before = np.full(BUCKETS, 1.0 / BUCKETS)
        for depth, seen in enumerate(self._seen):
            before = shares[depth] = (seen + lean * before) / (seen.sum() + lean)
        return shares

    def _factors(self, num_sequences: int, groups: Sequence[Hashable]) -> list[float]:
        """Of each sequence: below 1 by how much less its group's tokens are accepted than those of
        all groups, above 1 by how much less they are rejected."""
        if not groups:
            return [1.0] * num_sequences
        factors = {group: self._factor(group) for group in set(groups)}
        return [factors[group] for group in groups]

    def _factor(self, group: Hashable) -> float:
        """Leaning on what is accepted of all groups, more or less than expected as that is: rates
        follow it too, and would follow it twice."""
        if group not in self._groups:
            return 1.0
        lean, (num, expected, accepted) = self._prior.leaning, self._groups[group]
        all_num, all_expected, all_accepted = self._all_groups
        if all_accepted <= all_expected:
            expected *= (all_accepted + 1.0) / (all_expected + 1.0)
        else:
            rejected = (all_num - all_accepted + 1.0) / (all_num - all_expected + 1.0)
            expected = num - (num - expected) * rejected
        if accepted <= expected:
            return (accepted + lean) / (expected + lean)
        return (num - expected + lean) / (num - accepted + lean)

    def _learn_group(
        self, group: Hashable, num_groups: int, judged: Sequence[int], num_accepted: int
    ) -> None:
        """num_groups: in the round. judged: places in the flat (D, C), of one draft."""
        fade, rates = 1.0 / (self._prior.leaning * 8), self._listed_rates
        expected = sum([rates[at // BUCKETS][at % BUCKETS] for at in judged])
        new = len(judged), expected, num_accepted
        self._groups[group] = _faded(self._groups.pop(group, NOTHING), fade, new)
        self._all_groups = _faded(self._all_groups, fade / num_groups, new)
        if len(self._groups) > self._prior.num_groups:
            self._groups.popitem(last=False)


def _faded(counts: Counts, fade: float, new: Counts) -> Counts:
    keep = 1.0 - fade
    return keep * counts[0] + new[0], keep * counts[1] + new[1], keep * counts[2] + new[2]


def _multiplied(rates: Array, factors: Array) -> Array:
    """By the factors of groups."""
    return np.where(factors <= 1.0, rates * factors, 1.0 - (1.0 - rates) / factors)


def _with_means(rates: Array, shares: Array, means: Array) -> Array:
    """rates (D, C) whose odds are multiplied by one number for each depth, such that their means,
    weighted with `shares`, are `means` (D,)."""
    inside = np.clip(rates, 0.01, 0.99)
    logits = np.log(inside / (1.0 - inside))
    low, high = np.full(len(means), -MOST_SHIFT), np.full(len(means), MOST_SHIFT)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        is_low = (shares / (1.0 + np.exp(-logits - middle[:, None]))).sum(1) < means
        low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
    return 1.0 / (1.0 + np.exp(-logits - low[:, None]))
