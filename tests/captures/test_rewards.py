"""Rewards of trajectories, and the advantages of their turns."""

import pytest

from tests.captures.turns import turn
from tinkercloud.captures.rewards import reward_of, scored
from tinkercloud.captures.trajectories import trajectories

CHAIN = [turn("a", episode="1"), turn("b", "a", episode="1"), turn("c", "b", episode="1")]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ({}, None),
        ({"capture": 1.0}, 1.0),
        ({"capture": 1.0, "episode:1": 2.0}, 2.0),
        ({"capture": 1.0, "episode:2": 2.0}, 1.0),
        ({"episode:1": 2.0, "trajectory:c:0": 3.0}, 3.0),
        ({"trajectory:a:0": 3.0, "trajectory:b:0": 4.0}, 4.0),
        ({"trajectory:c:1": 3.0}, None),
        ({"turn:b:0": 0.5}, 0.5),
        ({"turn:b:0": 0.5, "turn:c:0": 0.25, "episode:1": -1.0}, -0.25),
        ({"episode:1": 0.0}, 0.0),
    ],
)
def test_the_nearest_reward_counts_and_turns_add_theirs(
    rewards: dict[str, float], expected: float | None
):
    (only,) = trajectories(CHAIN)
    assert reward_of(only, rewards) == expected


def test_a_turn_is_credited_with_its_own_reward_and_those_after_it():
    rewards = {"episode:1": 1.0, "turn:a:0": 10.0, "turn:b:0": 100.0}
    (only,) = scored(trajectories(CHAIN), rewards, "raw", None)
    assert only.advantages == (111.0, 101.0, 1.0)


def test_centered_advantages_of_a_group_sum_to_0_without_turn_rewards():
    turns = [turn(str(i), episode=str(i), group="g") for i in range(4)]
    rewards = {f"episode:g/{i}": float(i) for i in range(4)}
    found = scored(trajectories(turns), rewards, "centered", None)
    assert [one.advantages for one in found] == [(-1.5,), (-0.5,), (0.5,), (1.5,)]


def test_groups_are_centered_apart_and_what_names_none_is_of_the_session_s_group():
    turns = [turn("a", group="g"), turn("b", group="h"), turn("c")]
    rewards = {"trajectory:a:0": 4.0, "trajectory:b:0": 8.0, "trajectory:c:0": 2.0}
    found = scored(trajectories(turns), rewards, "centered", "g")
    assert [one.advantages for one in found] == [(1.0,), (0.0,), (-1.0,)]


def test_trajectories_without_a_reward_do_not_count_in_the_mean():
    turns = [turn("a"), turn("b"), turn("c")]
    rewards = {"trajectory:a:0": 1.0, "trajectory:b:0": 0.0}
    found = scored(trajectories(turns), rewards, "centered", None)
    assert [one.advantages for one in found] == [(0.5,), (-0.5,), ()]


def test_a_shared_turn_counts_once():
    turns = [turn("a"), turn("b", "a"), turn("c", "a")]
    rewards = {"trajectory:b:0": 1.0, "trajectory:c:0": 3.0}
    found = scored(trajectories(turns), rewards, "raw", None)
    assert [one.advantages for one in found] == [(0.5, 1.0), (1.5, 3.0)]
