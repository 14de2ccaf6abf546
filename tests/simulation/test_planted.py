"""A simulation that cannot fail proves nothing: each planted bug is found."""

import pytest

from tests.simulation.planted import PLANTED, finds

MAX_SCHEDULES = 2000
FOUND_LATE = (
    "deleted model is found",
    "order of arrival",
    "snapshot is not waited for",
    "snapshot without lost versions",
    "turn in pieces",
    "turn told before it is kept",
)


def first_found(bug: str) -> int | None:
    """The first seed that finds it."""
    return next((seed for seed in range(MAX_SCHEDULES) if finds(bug, seed)), None)


@pytest.mark.parametrize("bug", sorted(set(PLANTED) - set(FOUND_LATE)))
def test_a_bug_is_found(bug: str) -> None:
    assert first_found(bug) is not None


@pytest.mark.slow
@pytest.mark.parametrize("bug", FOUND_LATE)
def test_a_rare_bug_is_found(bug: str) -> None:
    assert first_found(bug) is not None
