"""Who is next, by what each user was given."""

from tinkercloud.embedded.fairness.virtual_counters import VirtualCounters


def test_the_user_who_was_given_least_is_next() -> None:
    counters = VirtualCounters()
    for user in ("a", "b"):
        counters.enter(user)
    counters.charge("a", 10)
    counters.charge("b", 10)
    assert counters.next_of(("a", "b")) == "b"
    assert counters.is_least_served("b") and not counters.is_least_served("a")
    counters.charge("b", 1)
    assert not counters.is_least_served("a") and not counters.is_least_served("b")


def test_who_was_idle_is_owed_nothing() -> None:
    counters = VirtualCounters()
    counters.enter("busy")
    counters.charge("busy", 1000)
    counters.enter("late")
    assert counters.is_least_served("late")
    counters.charge("late", 2)
    assert counters.next_of(("late", "busy")) == "busy"


def test_who_leaves_and_comes_back_owes_what_was_given() -> None:
    counters = VirtualCounters()
    for user in ("a", "b"):
        counters.enter(user)
    counters.charge("a", 50)
    counters.leave("a")
    counters.enter("a")
    assert counters.next_of(("a", "b")) == "b"


def test_a_user_with_several_jobs_stays_until_the_last_has_ended() -> None:
    counters = VirtualCounters()
    for _ in range(2):
        counters.enter("a")
    counters.leave("a")
    assert counters.num_users == 1
    counters.leave("a")
    assert counters.num_users == 0
