"""Steps are short while somebody else trains, as far as their times allow, and only then."""

from collections import Counter
from math import inf

import pytest

from tests.embedded.sampling.scheduler_bench import Bench
from tests.embedded.tiny import random_prompt
from tinkercloud.embedded.fairness.recent_users import SLICE_S
from tinkercloud.embedded.sampling.step_length import FIXED_PARTS, StepTimes

SLICE_MS = 1e3 * SLICE_S


# ---- what a step takes


@pytest.mark.parametrize(("fixed_ms", "row_ms"), [(30.0, 3.0), (2.0, 0.5), (0.0, 10.0)])
@pytest.mark.parametrize("first", [1.0, 67.0, 1000.0])
def test_steps_come_to_take_a_slice_whatever_a_row_takes(
    fixed_ms: float, row_ms: float, first: float
):
    times, work = StepTimes(), first
    for _ in range(60):
        times.took(work, fixed_ms + row_ms * work)
        work = times.work_within(SLICE_MS)
    assert fixed_ms + row_ms * work == pytest.approx(SLICE_MS, rel=0.05)


def test_where_reading_the_weights_takes_longer_than_a_slice_steps_keep_their_rows():
    fixed_ms, row_ms = 500.0, 5.0
    times, work, ms = StepTimes(), 300.0, list[float]()
    for _ in range(400):
        times.took(work, fixed_ms + row_ms * work)
        work = times.work_within(SLICE_MS)
        ms.append(fixed_ms + row_ms * work)
    assert max(ms) <= 1.05 * FIXED_PARTS * fixed_ms
    share_of_rows = sum(each - fixed_ms for each in ms) / sum(ms)
    assert share_of_rows >= 0.6, "two thirds of the time are the rows', but for what is tried out"


def test_nothing_is_known_before_the_first_step_and_rows_without_time_are_free():
    times = StepTimes()
    assert times.work_within(SLICE_MS) == 0.0
    times.took(8.0, 0.0)
    assert times.work_within(SLICE_MS) == inf


# ---- steps


def as_on_two_cores(max_batch: int = 64) -> Bench:
    """With the times of SmolLM2 in float32 on two cores with AVX2."""
    bench = Bench(num_blocks=20_000, max_batch=max_batch)
    bench.step_ms, bench.row_ms, bench.sample_ms = 30.0, 3.0, 3.0
    return bench


def steps_ms(bench: Bench, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        began_ms = bench.now_ms
        bench.step()
        taken.append(bench.now_ms - began_ms)
    return taken


def queue(bench: Bench, count: int, max_tokens: int = 4, user: str = "queues") -> None:
    for seed in range(count):
        bench.submit(random_prompt(64, seed), max_tokens=max_tokens, user=user)


@pytest.mark.parametrize("max_tokens", [4, 400], ids=["prompts", "samples"])
def test_steps_are_short_beside_anothers_training_and_long_again_after_it(max_tokens: int):
    bench, trains = as_on_two_cores(), set[str]()
    bench.scheduler.who_trains = lambda: trains
    queue(bench, 200, max_tokens)
    before = steps_ms(bench, 40)
    trains.add("trains")
    during = steps_ms(bench, 40)
    trains.clear()
    after = steps_ms(bench, 40)
    assert min(before[-10:]) > 2 * SLICE_MS
    assert max(during) <= 1.5 * SLICE_MS
    assert max(during[10:]) <= 1.1 * SLICE_MS
    assert min(after[10:]) > 2 * SLICE_MS


def test_the_first_steps_of_an_engine_are_short_too():
    bench = as_on_two_cores()
    bench.scheduler.who_trains = lambda: {"trains"}
    queue(bench, 20)
    assert max(steps_ms(bench, 20)) <= 1.1 * SLICE_MS


@pytest.mark.parametrize("trains", [set[str](), {"queues"}], ids=["nobody", "the same"])
def test_nothing_changes_where_nobody_else_trains(trains: set[str]):
    benches = [as_on_two_cores(), as_on_two_cores()]
    benches[0].scheduler.who_trains = lambda: trains
    for bench in benches:
        queue(bench, 100, 8)
    assert steps_ms(benches[0], 60) == steps_ms(benches[1], 60)


def test_steps_of_two_users_are_short_where_one_of_them_trains():
    bench = as_on_two_cores()
    bench.scheduler.who_trains = lambda: {"queues"}
    for user in ("queues", "others"):
        queue(bench, 100, 8, user)
    assert max(steps_ms(bench, 60)[20:]) <= 1.5 * SLICE_MS


def test_samples_that_a_short_step_leaves_out_take_turns_and_users_share_it():
    bench = as_on_two_cores()
    for user, count in (("many", 60), ("few", 4)):
        for seed in range(count):
            bench.submit(random_prompt(8, seed), max_tokens=400, user=user)
    while len(bench.scheduler.running) < 64:
        bench.step()
    bench.scheduler.who_trains = lambda: {"trains"}
    steps_ms(bench, 10)
    steps = [bench.step() for _ in range(60)]
    assert max(len(step) for step in steps) <= 30
    given = Counter(item.sequence for step in steps for item in step)
    by_user = {
        user: [given[each] for each in bench.scheduler.running if each.job.user == user]
        for user in ("many", "few")
    }
    assert by_user["few"] == [60] * 4, "less than an equal share"
    assert min(by_user["many"]) >= max(by_user["many"]) - 1


def test_everything_is_answered_beside_training_without_end():
    bench = as_on_two_cores(max_batch=8)
    bench.scheduler.who_trains = lambda: {"trains"}
    queue(bench, 30, 20)
    bench.run()
    assert len(bench.outcomes) == 30
    assert bench.num_held == 0
