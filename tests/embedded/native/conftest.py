"""Threads for the kernels' tests, and the form of their sums of pairs."""

from collections.abc import Callable, Iterator

import pytest

from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.native.team import Team


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    made = Team(2)
    yield made
    made.end()


@pytest.fixture
def form_of_pairs() -> Iterator[Callable[[int], bool]]:
    """Of sums of bfloat16 pairs (pairs.h): chooses it; whether there is a choice."""
    loaded = library()
    assert loaded is not None
    yield lambda widens: bool(loaded.choose_form_of_pairs(widens))
    loaded.choose_form_of_pairs(-1)
