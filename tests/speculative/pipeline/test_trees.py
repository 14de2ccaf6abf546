"""Trees of drafted tokens: what goes over the wire, and what is refused."""

import random

import pytest

from tinkercloud.speculative.remote.messages import BadMessage
from tinkercloud.speculative.remote.trees import paths_of, tree_of


def test_a_tree_s_paths_are_the_chains_it_was_made_of() -> None:
    rng = random.Random(0)
    for _ in range(200):
        drawn = {tuple(rng.randrange(3) for _ in range(rng.randint(1, 5))) for _ in range(6)}
        chains = {
            chain for chain in drawn
            if not any(other != chain and other[: len(chain)] == chain for other in drawn)
        }  # fmt: skip
        tokens, parents = tree_of(sorted(chains))
        assert set(paths_of(tokens, parents, 16)) == chains
        assert len(tokens) == len({chain[:i] for chain in chains for i in range(1, len(chain) + 1)})


def test_without_parents_it_is_a_chain() -> None:
    assert paths_of([4, 5, 6], [], 1) == ((4, 5, 6),)
    assert paths_of([], [], 1) == ()


@pytest.mark.parametrize(
    ("tokens", "parents", "what"),
    [
        ([1, 2], [-1], "2 drafted tokens with 1 parents"),
        ([1, 2], [-1, 1], "has the parent 1"),
        ([1, 2], [-2, 0], "has the parent -2"),
        ([1, 2, 3], [-1, -1, -1], "3 leaves; at most 2"),
    ],
)
def test_what_is_no_tree_is_refused(tokens: list[int], parents: list[int], what: str) -> None:
    with pytest.raises(BadMessage, match=what):
        paths_of(tokens, parents, 2)
