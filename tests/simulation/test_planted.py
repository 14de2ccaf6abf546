"""A simulation that cannot fail proves nothing: each planted bug is found."""

from typing import Any

import pytest

from tests.simulation.drawing import generate
from tests.simulation.planted import PLANTED, finds, planted, seeds_for
from tests.simulation.run import run_schedule
from tinkercloud.services.models.sampling_service import SamplingService

MAX_SCHEDULES = 2000
FOUND_LATE = (
    "deleted model is found",
    "order of arrival",
    "snapshot is not waited for",
    "snapshot without lost versions",
    "turn in pieces",
    "turn told before it is kept",
)

WITH_ALL_OF_THEM = 10
"""A seed whose schedule comes to what all of these replace; a later one will do."""


def first_found(bug: str) -> int | None:
    """A seed that finds it: the first one, of those that are tried."""
    return next((seed for seed in seeds_for(bug, MAX_SCHEDULES) if finds(bug, seed)), None)


@pytest.mark.parametrize(
    "bug",
    [
        # In the fast tests every third.
        pytest.param(bug, marks=[pytest.mark.slow] * (i % 3 != 0))
        for i, bug in enumerate(sorted(set(PLANTED) - set(FOUND_LATE)))
    ],
)
def test_a_bug_is_found(bug: str) -> None:
    assert first_found(bug) is not None


def test_a_rare_bug_changes_what_runs() -> None:
    """Whose finding is too slow to be looked for each time."""
    with planted(*FOUND_LATE) as num_calls:
        for seed in range(WITH_ALL_OF_THEM, WITH_ALL_OF_THEM + 20):
            run_schedule(generate(seed))
            if all(num_calls.values()):
                return
    pytest.fail(f"never called: {[name for name, num in num_calls.items() if not num]}")


def test_a_bug_that_does_not_fit_the_service_is_not_taken_for_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it is called so rarely that the schedule does not go on trying for long."""

    async def publish(self: Any, *arguments: Any, **options: Any) -> None:
        await self.renamed.publish_model(*arguments, **options)

    bug = "sampler follows its model"
    monkeypatch.setitem(PLANTED, bug, lambda: (SamplingService, "publish_model", publish))
    with pytest.raises(AssertionError, match="renamed"):
        finds(bug, next(seeds_for(bug, MAX_SCHEDULES)))


@pytest.mark.slow
@pytest.mark.parametrize("bug", FOUND_LATE)
def test_a_rare_bug_is_found(bug: str) -> None:
    assert first_found(bug) is not None
