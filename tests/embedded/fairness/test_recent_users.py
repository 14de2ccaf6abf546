"""Who was there a moment ago."""

from tinkercloud.embedded.fairness.recent_users import MOMENT_S, RecentUsers


def test_users_are_recent_for_a_moment_after_they_were_seen_last() -> None:
    now_s = [100.0]
    recent = RecentUsers(lambda: now_s[0])
    assert recent.users() == frozenset()
    recent.see("ada")
    now_s[0] += 0.6 * MOMENT_S
    recent.see("bob")
    assert recent.users() == {"ada", "bob"}
    now_s[0] += 0.6 * MOMENT_S
    assert recent.users() == {"bob"}
    recent.see("ada")
    assert recent.users() == {"ada", "bob"}
    now_s[0] += MOMENT_S
    assert recent.users() == frozenset()
