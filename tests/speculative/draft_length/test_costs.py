"""Cost tables against the machines that they measure, quiet and noisy."""

import json

import numpy as np
import pytest

from tests.speculative.draft_length.simulated import MACHINES, Machine, few_cores, memory_bound
from tinkercloud.speculative.draft_length.costs import (
    ROWS,
    CostTable,
    MeasuredCosts,
    interpolated,
    interpolated_at,
    isotonic,
    measure_costs,
    place,
)
from tinkercloud.speculative.draft_length.draft_costs import DraftCosts

CONTEXT = 300


def with_attention(rows: int, sequences: int, context: int) -> float:
    return memory_bound(rows) + (0.002 * rows + 0.01 * sequences) * context


def flat(plain: float = 10.0, verify: float = 20.0) -> CostTable:
    return CostTable(MeasuredCosts(ROWS, (plain,) * len(ROWS), (verify,) * len(ROWS)))


def test_a_quiet_machine_is_told_as_it_is_between_the_points_and_at_any_context():
    table = CostTable(measure_costs(with_attention))
    for sequences, rows, context in ((3, 5, 100), (20, 70, 1000), (8, 72, 64), (100, 256, 2000)):
        ms = table.verify_ms(np.array([float(rows)]), sequences, context)[0]
        assert ms == pytest.approx(with_attention(rows, sequences, context), rel=0.01)
        plain = table.plain_ms(sequences, context)
        assert plain == pytest.approx(with_attention(sequences, sequences, context), rel=0.01)


def test_beyond_the_grid_the_last_slope_goes_on():
    table = CostTable(measure_costs(with_attention))
    ms = table.verify_ms(np.array([512.0]), 64, 0.0)[0]
    assert ms == pytest.approx(memory_bound(512), rel=0.02)


def test_one_place_of_a_curve_is_what_all_places_at_once_give():
    coins = np.random.default_rng(0)
    for grid in (ROWS, (1,), (3,), (2, 5)):
        values = np.cumsum(coins.random(len(grid)))
        at = np.concatenate((np.array(grid, np.float64), coins.uniform(0, 2 * grid[-1], 50)))
        one_by_one = [interpolated_at(grid, values.tolist(), each) for each in at.tolist()]
        all_at_once = interpolated(np.array(grid, np.float64), values, at)
        assert one_by_one == pytest.approx(all_at_once.tolist(), rel=1e-12)
        places = np.interp(at, grid, np.arange(len(grid)))
        assert [place(grid, each) for each in at.tolist()] == pytest.approx(places.tolist())


def test_a_round_without_drafted_rows_is_a_plain_one():
    ms = flat(plain=10.0, verify=20.0).verify_ms(np.array([4.0, 5.0]), 4, 0.0)
    assert ms == pytest.approx([10.0, 20.0])


def test_a_slow_minute_within_the_measurement_cancels():
    calls = 0

    def slow_for_a_while(rows: int, sequences: int, context: int) -> float:
        nonlocal calls
        calls += 1
        return few_cores(rows) * (2.0 if 20 < calls < 60 else 1.0)

    ms = measure_costs(slow_for_a_while)
    assert ms.verify_ms == pytest.approx([few_cores(rows) for rows in ROWS], rel=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_the_nearest_curve_that_never_falls(seed):
    values = np.random.default_rng(seed).normal(size=12)
    fitted = isotonic(values)
    assert (np.diff(fitted) >= 0).all()
    # Minimax form of isotonic regression: the largest, over beginnings, of the smallest means.
    for i in range(12):
        means = [[values[a : b + 1].mean() for b in range(i, 12)] for a in range(i + 1)]
        assert fitted[i] == pytest.approx(max(min(row) for row in means))


def test_noise_never_makes_more_rows_cheaper():
    table = CostTable(Machine(few_cores, 3, jitter=0.5).measured())
    coins = np.random.default_rng(0)
    for _ in range(200):
        table.observe(int(coins.integers(4, 40)), 4, 50.0, float(coins.lognormal(3, 1)))
    ms = table.verify_ms(np.arange(5.0, 300.0), 4, 50.0)
    assert (np.diff(ms) >= 0).all()


@pytest.mark.parametrize("machine", MACHINES)
def test_a_wrong_ratio_is_mended_by_rounds_that_alternate(machine):
    ms = MACHINES[machine]
    table, noisy = flat(plain=10.0, verify=10.0), Machine(ms, 1)
    for _ in range(300):
        for rows in (8, 8, 24, 24, 32, 32):
            table.observe(rows, 8, 0.0, ms(rows) * noisy.noise())
    for rows in (24, 32):
        ratio = table.verify_ms(np.array([float(rows)]), 8, 0.0)[0] / table.plain_ms(8, 0.0)
        assert ratio == pytest.approx(ms(rows) / ms(8), rel=0.12)


def test_a_pace_that_changes_leaves_the_shape():
    table = CostTable(measure_costs(with_attention))
    before = table.verify_ms(np.array([9.0, 20.0]), 4, 0.0) / table.plain_ms(4, 0.0)
    for slower in (2.0, 0.5, 3.0):
        for _ in range(50):
            table.observe(4, 4, 0.0, slower * with_attention(4, 4, 0))
        assert table.plain_ms(4, 0.0) == pytest.approx(slower * memory_bound(4), rel=0.02)
    after = table.verify_ms(np.array([9.0, 20.0]), 4, 0.0) / table.plain_ms(4, 0.0)
    assert after == pytest.approx(before)


def test_one_absurd_time_moves_little():
    table = flat(plain=10.0, verify=10.0)
    table.observe(4, 4, 0.0, 10.0)
    table.observe(9, 4, 0.0, 1e6)
    ratio = table.verify_ms(np.array([9.0]), 4, 0.0)[0] / table.plain_ms(4, 0.0)
    assert ratio < 1.5  # a hundred thousand times too slow


def test_a_table_survives_json():
    table = CostTable(measure_costs(with_attention))
    read = CostTable.from_json(json.loads(json.dumps(table.to_json())))
    rows = np.arange(1.0, 300.0, 7.0)
    assert (read.verify_ms(rows, 4, CONTEXT) == table.verify_ms(rows, 4, CONTEXT)).all()
    assert read.plain_ms(4, CONTEXT) == table.plain_ms(4, CONTEXT)


# ---- the drafter's


def test_rounds_steps_and_tokens_are_told_apart():
    coins = np.random.default_rng(2)
    costs = DraftCosts()
    for _ in range(400):
        steps, sequences = int(coins.integers(1, 9)), int(coins.integers(1, 20))
        ms = 2.0 + 1.5 * steps + 0.1 * steps * sequences
        costs.observe(steps * sequences, steps, ms * float(coins.lognormal(0, 0.1)))
    for steps, sequences in ((1, 1), (8, 1), (4, 16)):
        expected = 2.0 + 1.5 * steps + 0.1 * steps * sequences
        assert costs.ms(steps * sequences, steps) == pytest.approx(expected, rel=0.1)


def test_drafting_costs_nothing_where_nobody_is_asked():
    assert DraftCosts(round_ms=5.0).ms(0, 0) == 0.0


def test_no_part_of_drafting_is_told_to_save_time():
    costs = DraftCosts()
    for tokens, steps, ms in ((8, 8, 5.0), (16, 8, 2.0), (64, 8, 1.0), (8, 1, 9.0)) * 10:
        costs.observe(tokens, steps, ms)
    assert min(costs.coefficients) >= 0.0
