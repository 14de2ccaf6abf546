"""How sampling and training share the device's time."""

import numpy as np
import pytest

from tinkercloud.embedded.process.fair_share import CREDIT_S, FairShareScheduler


@pytest.mark.parametrize("sample_s", [0.002, 0.03, 0.085, 0.4])
@pytest.mark.parametrize("slice_s", [0.1, 0.13, 0.5])
def test_both_get_half_of_the_time_whatever_their_steps_take(
    sample_s: float, slice_s: float
) -> None:
    scheduler, spent = FairShareScheduler(), {True: 0.0, False: 0.0}
    generator = np.random.default_rng(0)
    while sum(spent.values()) < 60:
        samples = scheduler.is_for_samples(samples_wait=True, training_waits=True)
        seconds = (sample_s if samples else slice_s) * generator.uniform(0.5, 2.0)
        spent[samples] += seconds
        scheduler.took(seconds, samples=samples, both_wait=True)
        assert abs(spent[True] - spent[False]) <= 2 * max(sample_s, slice_s)


@pytest.mark.parametrize("samples", [True, False])
def test_who_comes_to_one_that_was_alone_goes_first_for_half_a_second(samples: bool) -> None:
    scheduler, step_s = FairShareScheduler(), 0.1
    for _ in range(100):
        assert samples is not scheduler.is_for_samples(
            samples_wait=not samples, training_waits=samples
        )
        scheduler.took(step_s, samples=not samples, both_wait=False)
    first = 0
    while samples is scheduler.is_for_samples(samples_wait=True, training_waits=True):
        scheduler.took(step_s, samples=samples, both_wait=True)
        first += 1
    assert abs(first - CREDIT_S / step_s) <= 1


def test_one_that_comes_again_and_again_has_no_more_than_half_of_the_time() -> None:
    """Of the time from its first request on, and what it was behind by."""
    scheduler, spent, step_s = FairShareScheduler(), {True: 0.0, False: 0.0}, 0.05
    for step in range(4000):
        training_waits = step % 37 > 11
        samples = scheduler.is_for_samples(samples_wait=True, training_waits=training_waits)
        spent[samples] += step_s
        still_waits = (step + 1) % 37 > 11
        scheduler.took(step_s, samples=samples, both_wait=training_waits and still_waits)
        assert spent[False] <= spent[True] + CREDIT_S + step_s
