"""Trees of turns, and the paths through them that are trained."""

import pytest

from tests.captures.turns import turn
from tinkercloud.captures.trajectories import times_shared, trajectories
from tinkercloud.storage.captures import CapturedTurn, SampleRef


def paths(turns: list[CapturedTurn], branches: str = "continued") -> list[str]:
    found = trajectories(turns, branches)  # type: ignore[arg-type]
    return [">".join(str(step.ref) for step in one.steps) for one in found]


def test_a_conversation_is_one_trajectory():
    assert paths([turn("a"), turn("b", "a"), turn("c", "b")]) == ["a:0>b:0>c:0"]


def test_another_first_turn_begins_another_trajectory():
    assert paths([turn("a"), turn("x"), turn("b", "a"), turn("y", "x")]) == ["a:0>b:0", "x:0>y:0"]


def test_the_retry_that_was_continued_counts():
    turns = [turn("a1", digest="a"), turn("a2", digest="a"), turn("b", "a1")]
    assert paths(turns) == ["a1:0>b:0"]
    assert paths(turns, "all") == ["a1:0>b:0", "a2:0"]


def test_of_retries_that_were_not_continued_the_last_counts():
    assert paths([turn("a"), turn("b1", "a", "b"), turn("b2", "a", "b")]) == ["a:0>b2:0"]


def test_two_retries_that_were_both_continued_both_count():
    turns = [turn("a1", digest="a"), turn("a2", digest="a"), turn("b", "a1"), turn("c", "a2")]
    assert paths(turns) == ["a1:0>b:0", "a2:0>c:0"]


def test_the_same_prompt_in_another_episode_or_group_is_no_retry():
    turns = [
        turn("a1", digest="a", episode="1"),
        turn("a2", digest="a", episode="2"),
        turn("a3", digest="a", episode="2", group="g"),
    ]
    assert paths(turns) == ["a1:0", "a2:0", "a3:0"]


def test_of_the_samples_of_a_turn_those_that_were_continued_count():
    turns = [turn("a", num_samples=3), turn("b", "a:1")]
    assert paths(turns) == ["a:1>b:0"]
    assert paths(turns[:1]) == ["a:0", "a:1", "a:2"]
    assert sorted(paths(turns, "all")) == ["a:0", "a:1>b:0", "a:2"]


def test_other_questions_after_one_answer_are_branches_and_no_retries():
    turns = [turn("a"), turn("b", "a"), turn("c", "a")]
    assert paths(turns) == ["a:0>b:0", "a:0>c:0"]
    assert times_shared(trajectories(turns)) == {
        SampleRef("a", 0): 2,
        SampleRef("b", 0): 1,
        SampleRef("c", 0): 1,
    }


def test_thousands_of_turns_need_no_recursion():
    turns = [turn("0"), *(turn(str(i), str(i - 1)) for i in range(1, 3000))]
    (only,) = trajectories(turns)
    assert len(only.steps) == 3000


@pytest.mark.parametrize("branches", ["all", "continued"])
def test_no_turns_have_no_trajectories(branches: str):
    assert paths([], branches) == []
