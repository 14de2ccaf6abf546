"""The scheduler by itself, without a model: admission, shared prefixes, room, pre-emption."""

from dataclasses import replace

import numpy as np
import pytest

from tests.embedded.sampling.scheduler_bench import Bench, Computed, bare_base
from tests.embedded.tiny import random_prompt
from tinkercloud.core.types import SampleOutput
from tinkercloud.embedded.forward.kv_blocks import blocks_for
from tinkercloud.embedded.sampling.scheduler import (
    CHUNK,
    PREFILL_ROWS,
    SCORED_CHUNK,
)
from tinkercloud.embedded.sampling.sequences import Job
from tinkercloud.errors import ServerFault


def rows(items: list[Computed]) -> list[tuple[bool, int]]:
    return [(item.is_prompt, item.count) for item in items]


def prompts(items: list[Computed]) -> list[tuple[Job, int]]:
    return [(item.sequence.job, item.count) for item in items if item.is_prompt]


# ---- admission


def test_a_long_prompt_is_computed_a_chunk_a_step():
    bench = Bench()
    bench.submit(random_prompt(2 * CHUNK + 5, 0))
    assert [rows(bench.step()) for _ in range(3)] == [[(True, n)] for n in (CHUNK, CHUNK, 5)]


def test_a_scored_prompt_is_computed_in_smaller_chunks():
    bench = Bench()
    bench.submit(random_prompt(SCORED_CHUNK + 5, 0), prompt_logprobs=True)
    assert [rows(bench.step()) for _ in range(2)] == [[(True, SCORED_CHUNK)], [(True, 5)]]


def test_chunks_end_at_the_same_tokens_when_a_prefix_is_shared():
    """A runner that is not row invariant would give other bits for other cuts."""
    bench = Bench()
    prompt = random_prompt(2 * CHUNK, 0)
    bench.submit(prompt[:100])
    bench.run()
    bench.submit(prompt)
    shared = 100  # the last block of it was begun
    assert [rows(bench.step()) for _ in range(2)] == [[(True, CHUNK - shared)], [(True, CHUNK)]]


def test_prompts_of_one_step_have_as_many_rows_as_it_may_have():
    bench = Bench()
    for seed in range(5):
        bench.submit(random_prompt(400, seed))
    assert rows(bench.step()) == [(True, 400), (True, 400), (True, PREFILL_ROWS - 800)]


def test_a_sample_runs_in_every_step_from_its_prompts_last_chunk_on():
    bench = Bench()
    job = bench.submit(random_prompt(20, 0), n=2, max_tokens=3)
    assert [rows(bench.step()) for _ in range(3)] == [
        [(True, 20)],
        [(False, 1)] * 2,
        [(False, 1)] * 2,
    ]
    assert isinstance(bench.outcomes[job], SampleOutput)
    assert not bench.scheduler.is_busy


def test_no_more_samples_run_than_the_batch_holds_and_the_first_come_first():
    bench = Bench(max_batch=3)
    jobs = [bench.submit(random_prompt(20, seed), n=2, max_tokens=4) for seed in range(3)]
    bench.step()
    assert [s.job for s in bench.scheduler.running] == [jobs[0], jobs[0], jobs[1]]
    bench.run()
    assert list(bench.outcomes) == jobs


def test_no_prompt_is_begun_while_enough_samples_are_ready_or_run():
    bench = Bench(max_batch=2, max_begun=4.0)
    for seed in range(6):
        bench.submit(random_prompt(20, seed), n=2, max_tokens=50)
    bench.step()
    begun = [job.num_left for job in bench.scheduler.ready] + [len(bench.scheduler.running)]
    assert sum(begun) == 6  # the third prompt began when four were begun, which is not more
    bench.step()
    assert len(bench.scheduler.waiting) == 3


# ---- between users


def num_rows(items: list[Computed], user: str) -> int:
    return sum(item.count for item in items if item.is_prompt and item.sequence.job.user == user)


def busy_with_prompts(count: int, length: int) -> Bench:
    """Of the user `long`, of whom the first steps are over."""
    bench = Bench(num_blocks=4000)
    bench.step_ms, bench.row_ms, bench.read_ms = 10.0, 1.0, 1 / 3000
    for seed in range(count):
        bench.submit(random_prompt(length, seed), user="long")
    for _ in range(3):
        bench.step()
    return bench


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_long_prompt_takes_half_of_a_steps_time_beside_another_users_sample(reproducible: bool):
    bench = Bench(reproducible=reproducible)
    bench.step_ms, bench.row_ms = 10.0, 0.1
    bench.submit(random_prompt(20, 0), max_tokens=1500, user="short")
    for _ in range(3):
        bench.step()
    job = bench.submit(random_prompt(3000, 1), max_tokens=1, user="long")
    steps = [bench.step() for _ in range(400)]
    assert all(not item.is_prompt for item in steps[-1]), "the prompt has ended by then"
    assert job in bench.outcomes
    assert all(any(item.sequence.job.user == "short" for item in step) for step in steps)
    busy = [num_rows(step, "long") for step in steps if num_rows(step, "long")]
    assert max(busy) <= (100 if reproducible else CHUNK)
    prompt_ms = sum(num_rows(step, "long") for step in steps[:50]) * 0.1
    assert prompt_ms <= 0.6 * 50 * 10.0


def test_prompts_of_one_user_go_in_short_steps_while_another_was_there_a_moment_ago():
    bench = busy_with_prompts(10, 3500)
    alone = num_rows(bench.step(), "long")
    short = bench.submit(random_prompt(4, 9), max_tokens=1, user="short")
    while short not in bench.outcomes:
        bench.step()
    after = [num_rows(bench.step(), "long") for _ in range(560)]
    assert max(after[:300]) <= alone / 3, "who comes back waits for a short step"
    assert after[-1] >= alone / 2, "long steps again, which are faster"


def test_a_short_prompt_is_computed_at_once_beside_anothers_queue_of_long_ones():
    bench = busy_with_prompts(20, 3000)
    short = bench.submit(random_prompt(20, 100), max_tokens=10, user="short")
    steps = 0
    while short not in bench.outcomes:
        bench.step()
        steps += 1
    assert steps <= 12


def as_on_two_cores() -> Bench:
    """A bench with times as those of SmolLM2 on two cores, where positions take twice as long as
    the model's sizes let expect."""
    bench = Bench(num_blocks=5000, max_batch=64, bases=(bare_base(max_position_embeddings=8192),))
    bench.step_ms, bench.row_ms, bench.read_ms = 7.0, 1.2, 8e-4
    return bench


def short_sample_ms(bench: Bench, seed: int, max_tokens: int, pause_ms: float = 0.0) -> float:
    """For a user who comes in the middle of a step, after others' steps of pause_ms."""
    began_ms = last_ms = bench.now_ms
    while bench.now_ms < began_ms + pause_ms:
        last_ms = bench.now_ms
        bench.step()
    came_ms = (last_ms + bench.now_ms) / 2
    job = bench.submit(random_prompt(8, seed), max_tokens=max_tokens, user="short")
    while job not in bench.outcomes:
        bench.step()
    return bench.now_ms - came_ms


@pytest.mark.parametrize("max_tokens", [4, 16])
@pytest.mark.parametrize("pause_ms", [40.0, 1500.0])
def test_prompts_of_8000_tokens_slow_anothers_short_samples_by_two_at_most(
    max_tokens: int, pause_ms: float
):
    bench = as_on_two_cores()
    alone_ms = np.median([short_sample_ms(bench, seed, max_tokens) for seed in range(9)])
    long = [bench.submit(random_prompt(8000, seed), max_tokens=1, user="long") for seed in range(6)]
    for seed in range(3):  # what rows take is learned
        short_sample_ms(bench, 50 + seed, max_tokens)
    beside_ms = [short_sample_ms(bench, 100 + seed, max_tokens, pause_ms) for seed in range(15)]
    assert long[-1] not in bench.outcomes
    assert np.median(beside_ms) <= 2.0 * alone_ms
    assert max(beside_ms) <= 3.0 * alone_ms


def test_prompts_behind_long_contexts_add_no_more_to_others_steps_than_short_ones():
    bench = as_on_two_cores()
    bench.submit(random_prompt(20, 0), max_tokens=3000, user="short")
    for _ in range(3):
        bench.step()
    job = bench.submit(random_prompt(8000, 1), max_tokens=1, user="long")
    added_ms: dict[str, list[float]] = {"near": [], "far": []}
    while job.prompt.num_computed < 4000 and job not in bench.outcomes:
        began_ms, where = bench.now_ms, "near" if job.prompt.num_computed < 1000 else "far"
        bench.step()
        added_ms[where].append(bench.now_ms - began_ms - bench.step_ms)
    for where in added_ms.values():
        assert 0.2 * bench.step_ms <= np.mean(where) <= 0.6 * bench.step_ms


def test_a_token_behind_a_long_context_counts_as_more_than_one():
    bench = as_on_two_cores()
    far = bench.submit(random_prompt(6100, 0), max_tokens=1, user="far")
    while far.prompt.num_computed < 6000:
        bench.step()
    near = [bench.submit(random_prompt(900, seed), max_tokens=1, user="near") for seed in range(3)]
    computed = {"far": 0, "near": 0}
    while far not in bench.outcomes:
        for item in bench.step():
            computed[item.sequence.job.user] += item.count
    assert near[-1] not in bench.outcomes
    assert computed["near"] >= 2.0 * computed["far"], "a row behind 6,000 takes three times as long"


def test_a_user_who_asks_ten_times_a_second_is_not_held_up_behind_anothers_long_prompts():
    """Times of SmolLM2 on two cores with AVX2, where the samples take most of the machine: half of
    it is enough for them as long as the other half has its price."""
    bench = as_on_two_cores()
    bench.step_ms, bench.sample_ms = 13.5, 2.4
    bench.row_ms, bench.read_ms, bench.open_ms = 2.5, 1e-3, 4e-3
    due_ms, long, asked = 0.0, list[Job](), dict[Job, float]()
    took_ms: list[tuple[float, float]] = []
    while bench.now_ms < 30_000.0:
        while due_ms <= bench.now_ms:
            prompt = random_prompt(8, int(due_ms))
            asked[bench.submit(prompt, max_tokens=4, user="short")] = due_ms
            due_ms += 100.0
        if not long and due_ms > 5000.0:
            for seed in range(8):
                long.append(bench.submit(random_prompt(8000, seed), max_tokens=4, user="long"))
        bench.step()
        for job in asked.keys() & bench.outcomes.keys():
            took_ms.append((bench.now_ms, bench.now_ms - asked.pop(job)))
    alone_ms = np.median([ms for at_ms, ms in took_ms if at_ms < 5000.0])
    beside_ms = [ms for at_ms, ms in took_ms if at_ms >= 15_000.0]
    assert long[-1] not in bench.outcomes
    assert np.median(beside_ms) <= 2.2 * alone_ms
    assert max(beside_ms) <= 4.0 * alone_ms


def test_a_user_who_is_next_waits_only_for_own_samples():
    """A prompt of whoever is next takes no less than a short step where nobody else decodes."""
    bench = as_on_two_cores()
    bench.submit(random_prompt(8, 0), max_tokens=300, user="short")
    for _ in range(3):
        bench.step()
    for seed in range(3):
        bench.submit(random_prompt(8000, 1 + seed), max_tokens=1, user="long")
    for _ in range(60):
        bench.step()
    job = bench.submit(random_prompt(20, 9), max_tokens=1, user="short")
    steps = 0
    while job not in bench.outcomes:
        bench.step()
        steps += 1
    assert steps <= 6


def test_one_users_prompts_take_all_rows_of_a_step_that_are_to_be_had():
    bench = Bench()
    bench.submit(random_prompt(20, 0), max_tokens=100, user="only")
    bench.step()
    bench.submit(random_prompt(CHUNK, 1), user="only")
    assert num_rows(bench.step(), "only") == CHUNK


def test_who_queues_ten_thousand_samples_shares_the_batch_with_who_comes_later():
    bench = Bench(max_batch=4, max_begun=4.0)
    many = [bench.submit([seed % 250], max_tokens=50, user="many") for seed in range(10_000)]
    for _ in range(5):
        bench.step()
    late = [bench.submit(random_prompt(20, seed), max_tokens=5, user="late") for seed in range(4)]
    steps = 0
    while not all(job in bench.outcomes for job in late):
        assert sum(not item.is_prompt for item in bench.step()) <= 4
        steps += 1
    # Two at a time, five tokens each: nobody waits for the end of one of the many.
    assert steps <= 16
    for job in many[:9990]:
        bench.scheduler.drop(job)
    bench.run()
    assert len(bench.outcomes) == 14
    assert bench.num_held == 0


def test_the_blocks_of_one_users_prompts_are_taken_for_anothers_short_sample():
    bench = Bench(num_blocks=blocks_for(2000))
    for seed in range(4):
        bench.submit(random_prompt(1500, seed), user="long")
    for _ in range(4):
        bench.step()
    assert bench.pool.num_available < 4
    short = bench.submit(random_prompt(40, 9), max_tokens=20, user="short")
    steps = 0
    while short not in bench.outcomes:
        bench.step()
        steps += 1
    assert steps <= 30
    bench.run()
    assert len(bench.outcomes) == 5


# ---- shared blocks


def test_a_prompt_waits_for_a_prefix_that_another_computes_and_then_shares_it():
    bench = Bench()
    prompt = random_prompt(100, 0)
    first, second = bench.submit([*prompt, 1]), bench.submit([*prompt, 2])
    assert [item.sequence.job for item in bench.step()] == [first]
    assert not second.prompt.blocks
    assert prompts(bench.step()) == [(second, 101 - 96)]
    assert (first.cache_hit_tokens, second.cache_hit_tokens) == (0, 96)


def test_a_prompt_whose_prefix_is_computed_only_in_part_waits_no_longer_than_that():
    bench = Bench()
    prompt = random_prompt(64, 0)
    bench.submit(prompt)
    other = bench.submit([*prompt[:20], *random_prompt(40, 1)])
    bench.step()
    assert prompts(bench.step()) == [(other, 60 - 20)]


def test_without_reproducible_keys_and_values_nothing_is_shared():
    bench = Bench(reproducible=False)
    for _ in range(2):
        bench.submit(random_prompt(100, 0))
    assert rows(bench.step()) == [(True, 100)] * 2
    bench.run()
    later = bench.submit(random_prompt(100, 0))
    assert rows(bench.step()) == [(True, 100)]
    assert later.cache_hit_tokens == 0


def test_scored_prompts_share_nothing_since_logits_are_not_cached():
    bench = Bench()
    bench.submit(random_prompt(100, 0))
    bench.run()
    bench.submit(random_prompt(100, 0), prompt_logprobs=True)
    assert rows(bench.step()) == [(True, 100)]


def test_samples_share_their_prompts_full_blocks_and_the_last_sample_takes_the_prompts_own():
    bench = Bench()
    bench.submit(random_prompt(40, 0), n=3, max_tokens=5)
    bench.step()
    assert bench.num_held == 2 + 3
    first, second, last = (s.blocks for s in bench.scheduler.running)
    assert first[:2] == second[:2] == last[:2]
    assert len({first[2], second[2], last[2]}) == 3
    bench.run()
    assert bench.num_held == 0


# ---- room


def test_a_sample_begins_only_where_blocks_to_its_end_are_left():
    bench = Bench(num_blocks=10)
    for seed in range(2):
        bench.submit(random_prompt(32, seed), max_tokens=90)  # 2 blocks and 6 more
    bench.step()
    assert len(bench.scheduler.running) == 1
    assert len(bench.scheduler.ready) == 1
    bench.run()
    assert bench.scheduler.num_preempted == 0


def test_a_sample_begins_where_nobody_else_has_blocks_however_many_it_may_need():
    bench = Bench(num_blocks=4)
    bench.submit(random_prompt(32, 0), max_tokens=500)
    bench.step()
    assert len(bench.scheduler.running) == 1


def test_prompts_that_hold_all_blocks_do_not_wait_for_each_other():
    bench = Bench(num_blocks=blocks_for(CHUNK) * 2)
    jobs = [bench.submit(random_prompt(CHUNK + 20, seed), max_tokens=3) for seed in range(3)]
    bench.run()
    assert sorted(map(id, bench.outcomes)) == sorted(map(id, jobs))
    assert all(isinstance(outcome, SampleOutput) for outcome in bench.outcomes.values())


def test_drafts_take_free_blocks_and_never_another_sequences():
    bench = Bench(num_blocks=3)
    bench.submit(random_prompt(16, 0), n=2, max_tokens=8)
    bench.step()
    first, second = bench.scheduler.running
    bench.scheduler.schedule()
    assert bench.num_held == 3
    assert bench.scheduler.reserve_draft(first, 15)
    assert not bench.scheduler.reserve_draft(first, 16)
    assert second.blocks


def test_blocks_of_rejected_tokens_are_freed():
    bench = Bench()
    bench.submit(random_prompt(20, 0), max_tokens=80)
    bench.step()
    (sample,) = bench.scheduler.running
    (item,) = bench.scheduler.schedule()
    assert bench.scheduler.reserve_draft(sample, 40)
    assert len(sample.blocks) == blocks_for(21 + 40)
    bench.scheduler.computed(replace(item, drafted=(7,) * 40))
    sample.tokens += [7, 7, 7]
    bench.scheduler.accepted(sample, 2)
    assert len(sample.blocks) == blocks_for(24)
    assert sample.num_pending == 1


# ---- pre-emption


def crowded(**more: object) -> tuple[Bench, list[Job]]:
    """Three samples that begin with hope and then have too few blocks."""
    bench = Bench(num_blocks=2 * blocks_for(CHUNK), **more)
    jobs = [bench.submit(random_prompt(32, seed), max_tokens=600) for seed in range(3)]
    return bench, jobs


def until_preempted(bench: Bench) -> None:
    while not bench.scheduler.num_preempted:
        bench.step()


def test_the_youngest_sample_loses_its_blocks_first_and_keeps_its_place_and_tokens():
    bench, jobs = crowded()
    until_preempted(bench)
    running = bench.scheduler.running
    assert [s.job for s in running] == jobs[: len(running)]
    assert [bool(s.blocks) for s in running] == [True] * (len(running) - 1) + [False]
    assert len(running[-1].logprobs) > 0
    assert bench.discarded == []


def test_samples_end_in_the_order_in_which_they_began():
    bench, jobs = crowded()
    bench.run()
    assert list(bench.outcomes) == jobs
    assert bench.scheduler.num_preempted > 0
    assert bench.num_held == 0


def test_a_pre_empted_sample_computes_its_tokens_again_in_chunks():
    bench, _ = crowded()
    until_preempted(bench)
    youngest = bench.scheduler.running[-1]
    num_tokens = len(youngest.tokens)
    counts = []
    while len(youngest.tokens) == num_tokens:
        counts += [item.count for item in bench.step() if item.sequence is youngest]
    # What nobody has evicted of it in the meantime is found again.
    assert 1 <= sum(counts) <= num_tokens
    assert max(counts) <= CHUNK


def test_where_keys_and_values_are_not_reproducible_a_pre_empted_sample_starts_over():
    bench, jobs = crowded(reproducible=False)
    before = dict.fromkeys(jobs, 0)
    while not bench.scheduler.num_preempted:
        before = {s.job: len(s.logprobs) for s in bench.scheduler.running}
        bench.step()
    (sample,) = bench.discarded
    assert sample.logprobs == []
    assert len(sample.tokens) == sample.job.num_prompt
    assert bench.scheduler.num_discarded == before[sample.job]
    bench.run()
    assert len(bench.outcomes) == 3


def test_prompts_give_way_before_samples():
    bench = Bench(num_blocks=6, max_batch=1)
    bench.submit(random_prompt(32, 0), max_tokens=60)  # 2 blocks and 4 more
    bench.submit(random_prompt(30, 1), max_tokens=2)
    bench.step()
    (sample,), (ready,) = bench.scheduler.running, bench.scheduler.ready
    assert ready.prompt.blocks
    while bench.scheduler.ready:
        bench.step()
    assert bench.scheduler.waiting == (ready,)
    assert sample.blocks
    assert bench.scheduler.num_preempted == 0
    bench.run()


def test_one_bases_samples_take_no_blocks_of_another_base():
    bases = (bare_base("a"), bare_base("b"))
    bench = Bench(num_blocks=2 * blocks_for(CHUNK), bases=bases)
    for seed in range(3):
        bench.submit(random_prompt(32, seed), max_tokens=600)
    youngest = bench.submit(random_prompt(32, 9), max_tokens=600, base=1)
    until_preempted(bench)
    assert bench.scheduler.num_preempted == 1
    assert youngest in [s.job for s in bench.scheduler.running if s.blocks]


def test_a_sample_begins_beside_samples_of_another_base_however_many_blocks_it_may_need():
    bench = Bench(num_blocks=4, bases=(bare_base("a"), bare_base("b")))
    for base in (0, 1):
        bench.submit(random_prompt(32, 0), max_tokens=500, base=base)
    bench.step()
    assert len(bench.scheduler.running) == 2


# ---- requests that cannot be served


def test_a_request_that_can_never_have_its_blocks_fails_and_the_others_go_on():
    bench = Bench(num_blocks=5)
    long, short = bench.submit(random_prompt(100, 0)), bench.submit(random_prompt(20, 1))
    bench.run()
    assert isinstance(bench.outcomes[long], ServerFault)
    assert "raise engine.kv_cache_bytes" in str(bench.outcomes[long])
    assert isinstance(bench.outcomes[short], SampleOutput)
    assert bench.num_held == 0


def test_no_sample_of_a_failed_request_is_scheduled():
    """Two samples begin with hope, the second is pre-empted, the first outgrows all blocks."""
    bench = Bench(num_blocks=blocks_for(CHUNK) + 8)
    job = bench.submit(random_prompt(15, 0), n=2, max_tokens=1000)
    while job not in bench.outcomes:
        items = bench.step()
    assert isinstance(bench.outcomes[job], ServerFault)
    assert items == []
    assert bench.num_held == 0
    assert {sample.job for sample in bench.discarded} == {job}


def test_clearing_returns_every_request_once():
    bench = Bench(max_batch=2)
    jobs = [bench.submit(random_prompt(20, seed), n=3, max_tokens=9) for seed in range(3)]
    bench.step()
    assert bench.scheduler.running and bench.scheduler.ready
    assert sorted(map(id, bench.scheduler.clear())) == sorted(map(id, jobs))
    assert not bench.scheduler.is_busy


# ---- any load


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_any_load_is_answered_and_no_block_is_written_by_two(seed: int, reproducible: bool):
    rng = np.random.default_rng(seed)
    bench = Bench(
        num_blocks=int(rng.integers(12, 60)),
        max_batch=int(rng.integers(1, 6)),
        max_begun=float(rng.integers(1, 10)),
        reproducible=reproducible,
    )
    bench.scheduler.who_trains = lambda: {"0"} if rng.random() < 0.5 else set()
    beginning = random_prompt(100, seed)
    jobs = []
    for step in range(4000):
        if len(jobs) < 12 and step % 5 == 0:
            prompt = [*beginning[: rng.integers(0, 100)], *random_prompt(rng.integers(1, 60), step)]
            jobs.append(
                bench.submit(
                    prompt, n=int(rng.integers(1, 4)), max_tokens=int(rng.integers(1, 150)),
                    prompt_logprobs=bool(rng.random() < 0.2),
                    user=str(rng.integers(0, 3)),
                )
            )  # fmt: skip
        written: list[int] = []
        for item in bench.step():
            assert item.count > 0
            written += item.written
        assert len(set(written)) == len(written)
        if len(jobs) == 12 and not bench.scheduler.is_busy:
            break
    assert len(bench.outcomes) == 12
    assert bench.num_held == 0
