"""Which drafted tokens are worth a row: the most tokens per millisecond (TurboSpec 2406.14066).

Of n drafted tokens those most likely to be accepted bring most, and since a token is never likelier
to be accepted than the one before it, these are prefixes of the drafts: only n is to be chosen. All
n are tried at once rather than until the next one does not pay: a target's time rises in steps, and
beyond a step there may be room.

Axes: B sequences, D depths, N = B * D drafted tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Cost = Callable[[Array, Array], Array]
"""(drafted rows (N + 1,), tokens (N + 1,)) -> milliseconds of a round with so many, (N + 1,)."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """counts (B,): drafted tokens of each sequence. goodput: expected, in tokens per millisecond,
    and plain: that without drafts."""

    counts: tuple[int, ...]
    goodput: float
    plain: float

    @property
    def gain(self) -> float:
        """What speculation brings, as a share of plain: 0.5 is half as much again."""
        return self.goodput / self.plain - 1.0


@dataclass(frozen=True, slots=True)
class Limit:
    """rows: drafted ones in all, at most. urgency (B,): weights of the sequences, the highest are
    served first, None for all alike. sacrifice: the share of the goodput that this may cost."""

    rows: float = float("inf")
    urgency: Array | None = None
    sacrifice: float = 0.03


def allocate(
    survival: Array, rows: Array, cost: Cost, plain_ms: float, limit: Limit | None = None
) -> Allocation:
    """survival (B, D), never rising along D; 0: no such token. rows (B, D): what each is expected
    to take of a forward. plain_ms: of a round without drafts."""
    limit = limit or Limit()
    order = _order(survival)
    goodput = _goodput(survival, rows, order, cost, limit.rows)
    plain = len(survival) / plain_ms
    most = int(np.argmax(goodput))
    if not most or goodput[most] <= plain:
        return Allocation((0,) * len(survival), plain, plain)
    best = float(goodput[most])
    if limit.urgency is not None:
        urgent = _order(survival * limit.urgency[:, None])
        weighted = _goodput(survival, rows, urgent, cost, limit.rows)
        if most < len(weighted) and weighted[most] >= max(plain, (1.0 - limit.sacrifice) * best):
            order, best = urgent, float(weighted[most])
    return Allocation(_counts(order[:most], survival.shape), best, plain)


def choose(
    survivals: Sequence[Sequence[float]],
    times_plain: Sequence[float],
    plain_ms: float,
    limit: Limit | None = None,
) -> Allocation:
    """`allocate` of drafts that have come, which is done in every round: on lists, since few tokens
    take less time so. survivals: of each draft's tokens. times_plain: how long a round with so many
    drafted rows takes, in plain rounds, from 0 on; beyond its end none is verified."""
    limit, many = limit or Limit(), len(survivals)
    tokens = [
        (-s, depth, i)  # in the order in which they are to be taken
        for i, draft in enumerate(survivals)
        for depth, s in enumerate(draft)
        if s > 0.0
    ]
    order = sorted(tokens)
    within = int(min(limit.rows, len(times_plain) - 1))
    gained, most, best = 0.0, 0, 1.0
    for num, (minus_survival, _, _) in enumerate(order[:within], 1):
        gained -= minus_survival
        times = (many + gained) / (many * times_plain[num])
        if times > best:
            most, best = num, times
    if most and limit.urgency is not None:
        weights = limit.urgency.tolist()
        urgent = sorted([(s * weights[i], depth, i, s) for s, depth, i in tokens])[:most]
        gained = -sum([token[3] for token in urgent])
        times = (many + gained) / (many * times_plain[most])
        if times >= max(1.0, (1.0 - limit.sacrifice) * best):
            order, best = urgent, times
    counts = [0] * many
    for token in order[:most]:
        counts[token[2]] += 1
    plain = many / plain_ms
    return Allocation(tuple(counts), best * plain, plain)


def _order(weights: Array) -> NDArray[np.int64]:
    """Indices into the flat (B, D), heaviest first, without those of no weight; of equals the
    shallower one, whoever's it is: what a draft's first token is worth is better known."""
    many, depths = weights.shape
    order = np.argsort(-weights.T, axis=None, kind="stable")[: np.count_nonzero(weights)]
    return order % many * depths + order // many


def _goodput(
    survival: Array, rows: Array, order: NDArray[np.int64], cost: Cost, most_rows: float
) -> Array:
    """Of the first n of the order, for every n that keeps within the rows."""
    tokens = np.arange(len(order) + 1, dtype=np.float64)
    taken = _sums(rows, order)
    inside = int(np.searchsorted(taken, most_rows, side="right"))
    gains = _sums(survival, order)[:inside]
    return (len(survival) + gains) / cost(taken[:inside], tokens[:inside])


def _sums(values: Array, order: NDArray[np.int64]) -> Array:
    """Of the first n, for every n."""
    sums = np.zeros(len(order) + 1)
    np.cumsum(values.take(order), out=sums[1:])
    return sums


def _counts(chosen: NDArray[np.int64], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(np.bincount(chosen // shape[1], minlength=shape[0]).tolist())
