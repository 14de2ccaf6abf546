"""How likely drafted tokens are to stand, as counted: drafters' own confidences are not calibrated.

A token's rate is that of its depth and its bucket of confidence, given that those before it stood;
with few counts it leans on the bucket's rate, and that on the drafter's. What was counted fades.
A group of samples whose drafts stand more often than expected, or less, is told apart by a factor.

Axes: B sequences, D depths, C buckets of confidence.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinkercloud.speculative.draft_length.rounds import Round

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
EDGES = np.array((0.2, 0.4, 0.6, 0.75, 0.85, 0.92, 0.97))
BUCKETS = len(EDGES) + 1


@dataclass(frozen=True, slots=True)
class Prior:
    """rate: of a drafter that nothing is known of; hopeful, else it is never tried. tokens: that it
    counts for. leaning: tokens that the wider rate counts for. memory: tokens after which what was
    counted weighs 1 / e. num_groups: remembered at most."""

    rate: float = 0.6
    tokens: float = 4.0
    leaning: float = 8.0
    memory: float = 2000.0
    num_groups: int = 4096


class Acceptance:
    """Of one drafter."""

    def __init__(self, max_depth: int = 8, prior: Prior | None = None) -> None:
        self._prior = prior or Prior()
        self._judged = np.zeros((max_depth, BUCKETS))
        self._stood = np.zeros((max_depth, BUCKETS))
        self._open = np.zeros(max_depth)  # sequences asked for this depth, verified up to it
        self._verified = np.zeros(max_depth)
        self._groups: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        self._rates = self._fitted()

    @property
    def overall(self) -> float:
        """The rate of all drafted tokens, given that those before stood."""
        prior = self._prior
        stood = self._stood.sum() + prior.rate * prior.tokens
        return float(stood / (self._judged.sum() + prior.tokens))

    def survivals(
        self, confidences: Sequence[Sequence[float]], groups: Sequence[Hashable] = ()
    ) -> Array:
        """(B, D): the chance that this token and all before it stand; 0 where there is none."""
        padded, lengths = self._padded(confidences)
        depths = np.arange(len(self._judged))
        rates = self._rates[depths, _buckets(padded)] * self._factors(len(lengths), groups)
        rates = np.where(depths < lengths[:, None], np.minimum(rates, 1.0), 0.0)
        return np.cumprod(rates, 1, dtype=np.float64)

    def forecast(self, num_sequences: int, groups: Sequence[Hashable] = ()) -> tuple[Array, Array]:
        """Before drafting: the chances (B, D) that a token asked for will be verified, and that it
        will stand. Drafts come shorter than asked, and those that do not pay are not verified."""
        lean = self._prior.leaning
        shares = (self._verified + lean) / (self._open + lean)
        by_depth = self._judged.sum(1), self._stood.sum(1)
        rates = (by_depth[1] + lean * self.overall) / (by_depth[0] + lean)
        rows = np.tile(np.cumprod(shares, dtype=np.float64), (num_sequences, 1))
        stands = np.minimum(rates * self._factors(num_sequences, groups), 1.0)
        return rows, rows * np.cumprod(stands, 1)

    def learn(self, told: Round) -> None:
        if not told.num_verified:
            self._open[0] += sum(asked > 0 for asked in told.asked)
            return
        padded, _ = self._padded(told.confidences)
        depths = np.arange(len(self._judged))
        verified, accepted, asked, num_judged = (
            np.array(counts, np.int64)[:, None]
            for counts in (told.verified, told.accepted, told.asked, told.num_judged)
        )
        judged = depths < num_judged
        stood = depths < accepted
        self.age(float(np.exp(-judged.sum() / self._prior.memory)))
        buckets = _buckets(padded)
        self._learn_groups(told.groups, judged, stood, self._rates[depths, buckets])
        columns = np.broadcast_to(depths, judged.shape)
        np.add.at(self._judged, (columns[judged], buckets[judged]), 1.0)
        np.add.at(self._stood, (columns[stood], buckets[stood]), 1.0)
        self._open += ((depths < asked) & (depths <= verified)).sum(0)
        self._verified += (depths < verified).sum(0)
        self._rates = self._fitted()

    def age(self, factor: float) -> None:
        """What was counted so far weighs `factor` of what it did."""
        for counts in (self._judged, self._stood, self._open, self._verified):
            counts *= factor
        self._rates = self._fitted()

    def _fitted(self) -> Array:
        lean = self._prior.leaning
        of_bucket = (self._stood.sum(0) + lean * self.overall) / (self._judged.sum(0) + lean)
        return (self._stood + lean * of_bucket) / (self._judged + lean)

    def _padded(self, confidences: Sequence[Sequence[float]]) -> tuple[Array, NDArray[np.int64]]:
        depth = len(self._judged)
        padded = np.zeros((len(confidences), depth))
        for row, own in zip(padded, confidences, strict=True):
            row[: len(own)] = own[:depth]
        return padded, np.array([len(own) for own in confidences], np.int64)

    def _factors(self, num_sequences: int, groups: Sequence[Hashable]) -> Array:
        """(B, 1)"""
        if not groups:
            return np.ones((num_sequences, 1))
        lean = self._prior.leaning
        known = [self._groups.get(group, (0.0, 0.0)) for group in groups]
        return np.array([[(stood + lean) / (expected + lean)] for expected, stood in known])

    def _learn_groups(
        self, groups: Sequence[Hashable], judged: Mask, stood: Mask, rates: Array
    ) -> None:
        fade = 1.0 - 1.0 / (self._prior.leaning * 8)
        for i, group in enumerate(groups):
            if group is None or not judged[i].any():
                continue
            expected, stands = self._groups.pop(group, (0.0, 0.0))
            expected = fade * expected + float(rates[i][judged[i]].sum())
            self._groups[group] = (expected, fade * stands + float(stood[i].sum()))
        while len(self._groups) > self._prior.num_groups:
            self._groups.popitem(last=False)


def _buckets(confidences: Array) -> NDArray[np.int64]:
    return np.searchsorted(EDGES, confidences, side="right")
