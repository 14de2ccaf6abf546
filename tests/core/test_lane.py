"""The order of one model's operations, without a server."""

import itertools

import pytest

from tinkercloud.core.lane import LaneOrder, Verdict


def lane_with(*arrivals: tuple[int, bool], next_seq_id: int = 1) -> LaneOrder[int]:
    """arrivals: (seq_id, is_chunk)."""
    order: LaneOrder[int] = LaneOrder(next_seq_id)
    for seq_id, is_chunk in arrivals:
        order.push(seq_id, seq_id, is_chunk=is_chunk)
    return order


def run(order: LaneOrder[int], *, give_up: bool = False) -> list[int]:
    """What may run now, in order."""
    ran: list[int] = []
    while (popped := order.pop(give_up=give_up)) is not None:
        item, verdict = popped
        ran.append(item if verdict is Verdict.RUN else -item)
    return ran


@pytest.mark.parametrize("arrival", list(itertools.permutations([1, 2, 3, 4])))
def test_any_arrival_order_runs_in_order(arrival: tuple[int, ...]) -> None:
    order = lane_with(*((seq_id, seq_id < 4) for seq_id in arrival))
    assert run(order) == [1, 2, 3, 4]


def test_an_early_chunk_waits_for_its_predecessor() -> None:
    order = lane_with((2, True), (3, True))
    assert run(order) == []
    order.push(1, 1, is_chunk=True)
    assert run(order) == [1, 2, 3]


def test_an_ordered_operation_proves_the_missing_numbers_below_it_lost() -> None:
    assert run(lane_with((1, True), (3, False))) == [1, 3]


def test_the_proof_also_frees_chunks_that_wait_below_it() -> None:
    assert run(lane_with((2, True), (4, True), (5, False))) == [2, 4, 5]


def test_a_number_above_the_proof_still_waits() -> None:
    assert run(lane_with((2, False), (4, True))) == [2]


def test_patience_may_end() -> None:
    order = lane_with((2, True), (4, True))
    assert run(order, give_up=True) == [2, 4]


def test_a_late_chunk_runs_when_only_chunks_ran_past_it() -> None:
    order = lane_with((2, True))
    assert run(order, give_up=True) == [2]
    order.push(1, 1, is_chunk=True)
    assert run(order) == [1]


def test_a_late_chunk_is_refused_once_a_step_was_taken_past_it() -> None:
    order = lane_with((2, False))
    assert run(order) == [2]
    order.push(1, 1, is_chunk=True)
    assert run(order) == [-1]


def test_a_late_ordered_operation_is_refused() -> None:
    order = lane_with((2, True))
    assert run(order, give_up=True) == [2]
    order.push(1, 1, is_chunk=False)
    assert run(order) == [-1]


def test_a_late_chunk_does_not_turn_the_lane_back() -> None:
    order = lane_with((3, True))
    assert run(order, give_up=True) == [3]
    order.push(1, 1, is_chunk=True)
    order.push(4, 4, is_chunk=True)
    assert run(order) == [1, 4]


def test_who_does_not_count_goes_to_the_end() -> None:
    order = lane_with((1, True), (2, False))
    assert (order.number(None), order.number(None), order.number(9), order.number(None)) == (
        *(3, 4, 9, 10),
    )
