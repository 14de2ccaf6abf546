"""When a draft is trained and for how long, and what is known of its acceptance."""

import json

import numpy as np
import pytest

from tinkercloud.speculative.learning.schedule import TimeBudget, Trigger, TriggerSettings
from tinkercloud.speculative.observability.acceptance_tracker import AcceptanceTracker


def test_every_so_many_policy_steps_it_is_time():
    trigger = Trigger(TriggerSettings(every_steps=3))
    assert [bool(trigger.due(step)) for step in range(5)] == [False] * 3 + [True] * 2
    trigger.updated(4)
    assert [bool(trigger.due(step)) for step in range(4, 8)] == [False] * 3 + [True]


def test_a_fall_of_acceptance_under_its_peak_is_seen_and_noise_is_not():
    trigger = Trigger(TriggerSettings(every_steps=0, fall=0.03, decay=0.8))
    noise = np.random.default_rng(0).uniform(-0.02, 0.02, 200)
    for wiggle in noise:
        trigger.observe(0.7 + wiggle)
        assert trigger.due(10**6) is None
    late = 0
    while trigger.due(0) is None:
        trigger.observe(0.6)
        late += 1
    assert late <= 4
    trigger.updated(0)
    trigger.observe(0.6)  # the peak is the one since the update
    assert trigger.due(0) is None


def test_work_takes_its_share_of_the_steps_time_and_debts_are_paid():
    now = [0.0]
    budget = TimeBudget(0.1, clock=lambda: now[0])
    policy_s = 0.0
    for seconds in np.random.default_rng(1).uniform(1, 30, 300):
        policy_s += seconds
        budget.step_took(seconds)
        while budget.left_s > 0:
            with budget.spending():
                now[0] += 0.7
        assert budget.spent_s <= 0.1 * policy_s + 0.7
    assert budget.spent_s > 0.095 * policy_s
    assert budget.earned_s == pytest.approx(0.1 * policy_s)


def test_time_that_is_not_used_is_not_hoarded():
    budget = TimeBudget(0.1, most_s=5.0)
    for _ in range(100):
        budget.step_took(60.0)
    assert budget.left_s == 5.0


def test_time_is_counted_when_the_work_fails():
    now = [0.0]
    budget = TimeBudget(1.0, clock=lambda: now[0])
    budget.step_took(10.0)

    def fails() -> None:
        with budget.spending():
            now[0] += 4.0
            raise ValueError

    with pytest.raises(ValueError):
        fails()
    assert budget.left_s == 6.0


# ---- acceptance


def test_windows_weigh_steps_by_what_was_proposed_in_them():
    tracker = AcceptanceTracker()
    tracker.add(1, 100, 90)
    tracker.add(2, 10, 0)
    tracker.add(2, 10, 10, "code")
    assert tracker.rate() == pytest.approx(100 / 120)
    assert tracker.rate(1) == pytest.approx(0.5)
    assert tracker.rate(category="code") == 1.0
    assert tracker.rate(category="prose") is None
    assert AcceptanceTracker().rate() is None


def test_the_trend_is_the_slope_of_a_line_through_the_steps():
    tracker = AcceptanceTracker()
    for step in range(0, 40, 2):
        tracker.add(step, 1000, 500 + 5 * step)
    assert tracker.trend() == pytest.approx(0.005)
    steps, rates = np.arange(0, 40, 2), 0.5 + 0.005 * np.arange(0, 40, 2)
    assert tracker.trend() == pytest.approx(np.polyfit(steps, rates, 1)[0])
    for step in range(40, 50):
        tracker.add(step, 1000, 700)
    assert tracker.trend(10) == pytest.approx(0.0, abs=1e-12)


def test_percentiles_are_those_of_the_steps():
    tracker = AcceptanceTracker()
    for step in range(101):
        tracker.add(step, 100, step)
    found = tracker.percentiles((10, 50, 90))
    assert found == pytest.approx({10: 0.1, 50: 0.5, 90: 0.9})
    assert AcceptanceTracker().percentiles() == {}


def test_what_lies_behind_the_window_is_forgotten():
    tracker = AcceptanceTracker(window=3)
    for step in range(10):
        tracker.add(step, 10, 10 if step >= 7 else 0)
    assert tracker.rate() == 1.0


def test_more_than_was_proposed_cannot_stand():
    with pytest.raises(ValueError, match="3 of 2"):
        AcceptanceTracker().add(0, 2, 3)


def test_everything_known_is_plain_json():
    tracker = AcceptanceTracker()
    tracker.add(1, 4, 3, "code")
    tracker.add(2, 4, 1, "prose")
    told = json.loads(json.dumps(tracker.as_json()))
    assert told["rate"] == 0.5
    assert told["windows"]["1"] == 0.25
    assert told["by_step"] == [[1, 0.75], [2, 0.25]]
    assert told["categories"]["code"]["rate"] == 0.75
    assert told["categories"]["prose"]["by_step"] == [[2, 0.25]]
