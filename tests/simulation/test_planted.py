"""A simulation that cannot fail proves nothing: each planted bug is found."""

import pytest

from tests.simulation.planted import PLANTED, finds

MAX_SCHEDULES = 2000
FOUND_EARLY = (
    "acknowledged before commit",
    "commit without flush",
    "gradient left out",
    "journal cut too far",
    "result given before record",
    "results of others",
)


def first_found(bug: str) -> int | None:
    """The first seed that finds it."""
    return next((seed for seed in range(MAX_SCHEDULES) if finds(bug, seed)), None)


@pytest.mark.parametrize("bug", FOUND_EARLY)
def test_a_bug_is_found(bug: str) -> None:
    assert first_found(bug) is not None


@pytest.mark.slow
@pytest.mark.parametrize("bug", sorted(set(PLANTED) - set(FOUND_EARLY)))
def test_every_bug_is_found(bug: str) -> None:
    assert first_found(bug) is not None
