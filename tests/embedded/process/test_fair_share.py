"""How sampling and training share the device's time."""

import numpy as np
import pytest

from tinkercloud.embedded.process.fair_share import FairShareScheduler


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


def test_who_is_alone_has_every_step_and_earns_no_credit() -> None:
    scheduler = FairShareScheduler()
    for _ in range(100):
        assert not scheduler.is_for_samples(samples_wait=False, training_waits=True)
        scheduler.took(0.1, samples=False, both_wait=False)
    assert scheduler.is_for_samples(samples_wait=True, training_waits=True)
    scheduler.took(0.1, samples=True, both_wait=True)
    assert not scheduler.is_for_samples(samples_wait=True, training_waits=True)
