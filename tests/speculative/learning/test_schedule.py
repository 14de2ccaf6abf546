"""When a draft is trained and for how long."""

import numpy as np
import pytest

from tinkercloud.speculative.learning.schedule import TimeBudget, Trigger, TriggerSettings


def test_every_so_many_policy_steps_it_is_time():
    trigger = Trigger(TriggerSettings(every_steps=3))
    assert [bool(trigger.due(step)) for step in range(5)] == [False] * 3 + [True] * 2
    trigger.updated(4)
    assert [bool(trigger.due(step)) for step in range(4, 8)] == [False] * 3 + [True]


def test_it_is_time_when_somebody_asks_until_a_training_has_ended():
    trigger = Trigger(TriggerSettings(every_steps=0))
    assert trigger.due(0) is None
    trigger.is_asked = True
    assert trigger.due(0) == trigger.due(5) == "asked for"
    trigger.updated(5)
    assert trigger.due(6) is None


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


def test_enough_new_cases_are_a_reason_while_a_draft_has_room_for_more():
    trigger = Trigger(TriggerSettings(every_steps=1, goal=0.8, least_cases=100))
    trigger.collected(99)
    assert trigger.due(0) is None
    trigger.collected(1)
    assert trigger.due(0) == "100 new cases"
    trigger.judged(1000, 900)
    assert trigger.due(0) is None  # it drafts well as it is
    trigger.judged(1000, 500)
    assert trigger.due(0) is not None


def test_after_trainings_that_made_nothing_better_more_cases_are_waited_for():
    trigger = Trigger(TriggerSettings(every_steps=0, least_cases=100))
    for patience in (1, 2, 4):
        trigger.collected(100 * patience - 1)
        assert trigger.due(0) is None
        trigger.collected(1)
        assert trigger.due(0) is not None
        trigger.updated(0, better=False)
    trigger.updated(0, better=True)
    trigger.collected(100)
    assert trigger.due(0) is not None


def test_quiet_time_is_counted_and_not_owed():
    now = [0.0]
    budget = TimeBudget(0.1, clock=lambda: now[0])
    with budget.spending(quiet=True):
        now[0] += 4.0
    assert (budget.quiet_s, budget.spent_s, budget.left_s) == (4.0, 0.0, 0.0)


def test_the_first_of_what_cannot_wait_may_begin_and_debts_make_the_next_wait():
    now = [0.0]
    budget = TimeBudget(0.1, clock=lambda: now[0])
    assert budget.may_borrow
    with budget.spending():
        now[0] += 1.0
    for _ in range(10):
        assert not budget.may_borrow
        budget.step_took(1.0)
    assert budget.may_borrow


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
