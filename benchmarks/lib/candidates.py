"""Whether two candidates for a position would pay: a bound from the time of rounds alone.

At every position the likelier candidate is the target's token with probability `first`; where it is
not, the other one is with probability `second`. A chain verifies the likelier ones; a tree the
nodes that are reached most often. Drafting is taken to cost nothing.
"""

import heapq
from collections.abc import Sequence


def chain_tokens(first: float, most: int) -> list[float]:
    """Expected tokens of a round with 0 to `most` drafted ones."""
    return [sum(first**depth for depth in range(n + 1)) for n in range(most + 1)]


def tree_tokens(first: float, second: float, most: int) -> list[float]:
    """As chain_tokens, of the best tree of so many nodes."""
    shares = (first, (1 - first) * second)
    reachable = [-share for share in shares]  # nodes whose parent is taken, likeliest first
    heapq.heapify(reachable)
    tokens = [1.0]
    for _ in range(most):
        reached = -heapq.heappop(reachable)
        tokens.append(tokens[-1] + reached)
        for share in shares:
            heapq.heappush(reachable, -reached * share)
    return tokens


def times_chain(first: float, second: float, costs: Sequence[float]) -> float:
    """Tokens per time of the best tree over those of the best chain, 1 where none is better.
    costs: of rounds with 0, 1, ... drafted tokens of each sample, in any unit."""
    most = len(costs) - 1
    chain, tree = chain_tokens(first, most), tree_tokens(first, second, most)
    return _best(tree, costs) / _best(chain, costs)


def _best(tokens: Sequence[float], costs: Sequence[float]) -> float:
    return max(n / cost for n, cost in zip(tokens, costs, strict=True))
