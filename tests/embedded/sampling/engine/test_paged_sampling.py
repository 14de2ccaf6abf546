"""Blocks: what is shared, what is given up and taken up again, and that none of it shows."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.embedded.decode_scene import with_weights
from tests.embedded.exactness import assert_same_samples_in_company
from tests.embedded.tiny import VOCAB, Sampler, ask, open_store, random_prompt, same, tuned
from tinkercloud.core.types import FromBase, SampleOutput
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.kv_blocks import (
    BLOCK_TOKENS,
    BlockPool,
    block_digests,
    digest_before,
)
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.sampling import base_states, scheduler, step_length
from tinkercloud.embedded.sampling.batch_plan import BatchItem
from tinkercloud.errors import ServerFault, VersionLost

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
PROMPT = random_prompt(100, 0)


def pool_of(sampler: Sampler) -> BlockPool:
    (state,) = sampler.engine.states
    return state.cache.pool


# ---- the compiled pass and the plain one


def distributions(store: ModelStore, version: str, **limits: int) -> np.ndarray:
    """(4, V): log-probabilities after some beginnings of PROMPT."""
    sampler, logprobs = Sampler(store, **limits), []
    for length in (1, 2, 17, 100):
        request = ask(PROMPT[:length], max_tokens=1, topk_sample_logprobs=VOCAB)
        (topk,) = [sequence.topk for sequence in sampler.one(version, request).sequences]
        assert topk is not None
        logprobs.append(topk.logprobs[0][np.argsort(topk.token_ids[0])])
    return np.array(logprobs)


def version_of(store: ModelStore, rank: int | None) -> str:
    return store.publish(FromBase("tiny")) if rank is None else tuned(store, "m", rank)


@pytest.mark.parametrize("rank", [None, 0, 4])
def test_the_compiled_pass_gives_the_plain_ones_log_probabilities(
    folder: Path, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(folder)
    version = version_of(store, rank)
    compiled = distributions(store, version)
    request = ask(PROMPT, max_tokens=1, prompt_logprobs=True)
    scored = Sampler(store).one(version, request).prompt_logprobs
    monkeypatch.setattr(runners, "library", lambda: None)
    np.testing.assert_allclose(compiled, distributions(store, version), atol=2e-4)
    plain = Sampler(store).one(version, request).prompt_logprobs
    np.testing.assert_allclose(scored[1:], plain[1:], atol=2e-4)


def test_in_bfloat16_the_compiled_pass_is_nearer_to_exact_than_the_plain_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact: the same rounded weights, all else in float32."""
    exact, narrow = open_store(folder), open_store(folder, dtype=torch.bfloat16)
    rounded = {name: t.float() for name, t in narrow.base("tiny").weights.items()}
    exact._bases["tiny"] = with_weights(exact.base("tiny"), rounded)
    base = narrow.publish(FromBase("tiny"))
    truth, compiled = (
        distributions(exact, exact.publish(FromBase("tiny"))),
        distributions(narrow, base),
    )
    monkeypatch.setattr(runners, "library", lambda: None)
    plain = distributions(narrow, base)
    likely = truth > np.log(1e-3)
    distance = [np.abs(logprobs - truth)[likely].mean() for logprobs in (compiled, plain)]
    assert 0 < distance[0] < 0.7 * distance[1], distance


@pytest.mark.parametrize("rank", [None, 0, 4])
def test_rows_are_the_same_bits_however_they_are_cut_and_with_any_number_of_threads(
    store: ModelStore, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = version_of(store, rank)
    whole = distributions(store, version)
    for size, threads in ((1, 1), (7, 2), (64, 3)):
        monkeypatch.setattr(scheduler, "CHUNK", size)
        cut = distributions(store, version, num_threads=threads)
        assert np.array_equal(whole, cut), (size, threads)


def test_scored_rows_are_the_same_bits_however_they_are_cut(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(folder)
    base, request = version_of(store, None), ask(PROMPT, max_tokens=1, prompt_logprobs=True)
    whole = Sampler(store).one(base, request).prompt_logprobs
    for size, threads in ((1, 1), (7, 2), (64, 3)):
        monkeypatch.setattr(scheduler, "SCORED_CHUNK", size)
        cut = Sampler(store, num_threads=threads).one(base, request).prompt_logprobs
        assert np.array_equal(whole[1:], cut[1:]), (size, threads)


def test_many_adapters_in_one_batch_are_each_as_alone(store: ModelStore, base: str) -> None:
    versions = [base, *(tuned(store, f"m{i}", rank=2 + 3 * i, seed=i) for i in range(4))]
    requests = {
        str(i): (versions[i % 5], ask(random_prompt(10 + i, i), n=2, max_tokens=30, seed=i))
        for i in range(15)
    }
    together = Sampler(store, num_threads=2).run(requests)
    for name, request in requests.items():
        same(Sampler(store).one(*request), together[name])


# ---- beginnings that are known


def test_of_a_cached_prompt_the_last_token_is_computed(store: ModelStore, base: str) -> None:
    sampler = Sampler(store)
    request = ask(PROMPT, max_tokens=30, seed=4, use_eos=False)
    first, second = sampler.one(base, request), sampler.one(base, request)
    assert (first.prompt_cache_hit_tokens, second.prompt_cache_hit_tokens) == (0, 99)
    same(first, second)


@pytest.mark.parametrize("num_tokens", [*range(1, 19), 95, 96, 97, 100])
def test_of_a_prompt_that_leaves_a_cached_one_what_they_share_is_not_computed_again(
    store: ModelStore, base: str, num_tokens: int
) -> None:
    """Where they part is within a block, and the first one's content stays."""
    sampler = Sampler(store)
    first = ask(PROMPT[:num_tokens], max_tokens=1, seed=4, use_eos=False)
    before = sampler.one(base, first)
    for shared in {max(1, num_tokens - 5), num_tokens - 1, num_tokens} - {0}:
        other = ask([*PROMPT[:shared], 7, 9], max_tokens=20, seed=5, use_eos=False)
        output = sampler.one(base, other)
        assert output.prompt_cache_hit_tokens >= shared // BLOCK_TOKENS * BLOCK_TOKENS
        same(output, Sampler(store).one(base, other))
    again = sampler.one(base, first)
    same(again, before)


def test_a_draft_is_judged_behind_what_is_cached_of_its_prompt(
    store: ModelStore, base: str
) -> None:
    """Rounds of a sample that another process drafts: each computes the draft and one token."""
    sampler = Sampler(store)
    whole = Sampler(store).one(base, ask(PROMPT, max_tokens=40, seed=2, use_eos=False))
    (sequence,), tokens = whole.sequences, list[int]()
    while len(tokens) < 36:
        right = sequence.tokens[len(tokens) : len(tokens) + 4].tolist()
        drafted = (*right[:3], right[3] ^ 1)
        request = ask([*PROMPT, *tokens], max_tokens=5, seed=2, use_eos=False, drafted=drafted)
        output = sampler.one(base, request)
        if tokens:
            assert output.prompt_cache_hit_tokens == len(PROMPT) + len(tokens) - 1
        tokens += output.sequences[0].tokens[:4].tolist()
    assert tokens == sequence.tokens[: len(tokens)].tolist()


def test_the_second_turn_of_a_chat_computes_only_what_is_new(store: ModelStore, base: str) -> None:
    sampler = Sampler(store)
    answer = sampler.one(base, ask(PROMPT, max_tokens=40, seed=2, use_eos=False)).sequences[0]
    turn = [*PROMPT, *answer.tokens.tolist(), *random_prompt(20, 1)]
    request = ask(turn, max_tokens=20, seed=3, use_eos=False)
    output = sampler.one(base, request)
    assert output.prompt_cache_hit_tokens == 100 + 39
    same(output, Sampler(store).one(base, request))


def test_prompts_that_arrive_together_compute_their_common_prefix_once(
    store: ModelStore, base: str
) -> None:
    requests = {
        str(i): (base, ask([*PROMPT, i], max_tokens=10, seed=i, use_eos=False)) for i in range(8)
    }
    together = Sampler(store).run(requests)
    hits = sorted(output.prompt_cache_hit_tokens for output in together.values())
    assert hits == [0] + [96] * 7
    for name, request in requests.items():
        same(Sampler(store).one(*request), together[name])


def test_samples_of_one_prompt_hold_its_full_blocks_once(store: ModelStore, base: str) -> None:
    sampler = Sampler(store)
    whole = Sampler(store).one(base, ask(PROMPT, n=16, max_tokens=2, seed=1, use_eos=False))
    request = ask(PROMPT, n=16, max_tokens=2, seed=1, use_eos=False)
    outcome: list[object] = []
    sampler.engine.submit(store.version(base), request, outcome.append)
    sampler.engine.step()
    assert sampler.engine.num_running == 16
    pool = pool_of(sampler)
    assert pool.num_blocks - pool.num_available == 6 + 16  # six full ones, and a last one for each
    while sampler.engine.busy:
        sampler.engine.step()
    same(outcome[0], whole)
    assert pool.num_available == pool.num_blocks


def test_versions_do_not_share_what_they_have_computed(store: ModelStore, base: str) -> None:
    sampler = Sampler(store)
    sampler.one(base, ask(PROMPT))
    assert sampler.one(tuned(store, "m", 4), ask(PROMPT)).prompt_cache_hit_tokens == 0


def test_a_released_version_is_lost_and_its_blocks_are_free(store: ModelStore, base: str) -> None:
    sampler = Sampler(store)
    sampler.one(base, ask(PROMPT))
    version = store.version(base)
    sampler.engine.forget(base)
    store.release(base)
    outcome: list[SampleOutput] = []
    sampler.engine.submit(version, ask(PROMPT), outcome.append)
    while sampler.engine.busy:
        sampler.engine.step()
    assert outcome[0].prompt_cache_hit_tokens == 0
    with pytest.raises(VersionLost):
        store.version(base)


# ---- short steps


def test_short_steps_for_anothers_training_change_nothing_but_time(
    store: ModelStore, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = {
        str(i): (base, ask(random_prompt(5 + 30 * i, i), n=3, seed=i, max_tokens=20 + i))
        for i in range(4)
    }
    long = Sampler(store).run(requests)
    monkeypatch.setattr(step_length.StepTimes, "work_within", lambda *_: 6.0)
    sampler = Sampler(store)
    sampler.engine.yield_to(lambda: {"trains"})
    num_samples: list[int] = []
    schedule = sampler.engine.scheduler.schedule

    def counted() -> list[BatchItem]:
        items = schedule()
        num_samples.append(sum(not item.sequence.is_prompt for item in items))
        return items

    monkeypatch.setattr(sampler.engine.scheduler, "schedule", counted)
    short = sampler.run(requests)
    assert max(num_samples) <= 6 < 12, "twelve run at once where steps may be long"
    for name, output in long.items():
        assert_same_samples_in_company(output, short[name], is_exact=True)


# ---- too few blocks


@pytest.mark.parametrize("compiled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_pre_empted_samples_have_the_same_tokens(
    store: ModelStore, base: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(runners, "library", lambda: None)
    requests = {
        str(i): (base, ask(random_prompt(40 + i, i), n=2, seed=i, max_tokens=400, use_eos=False))
        for i in range(2)
    }
    plenty = Sampler(store).run(requests)
    tight = Sampler(store, kv_cache_bytes=1)  # room for one sequence of 1024 tokens
    for name, output in tight.run(requests).items():
        assert_same_samples_in_company(output, plenty[name], is_exact=compiled)
    assert tight.engine.num_preempted > 0


def test_a_sequence_that_can_never_fit_is_refused_and_the_others_go_on(
    store: ModelStore, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_states, "blocks_for", lambda tokens: min(5, -(-tokens // 16)))
    sampler = Sampler(store, kv_cache_bytes=1)
    outputs = sampler.run(
        {"long": (base, ask(PROMPT, max_tokens=4)), "short": (base, ask(PROMPT[:20]))}
    )
    assert isinstance(outputs["long"], ServerFault)
    assert "engine.kv_cache_bytes" in str(outputs["long"])
    assert outputs["short"].sequences


def test_prompts_that_fill_all_blocks_do_not_wait_for_each_other(
    store: ModelStore, base: str
) -> None:
    """65 blocks: the first prompt has 33, the second's first chunk the other 32."""
    requests = {
        str(i): (base, ask(random_prompt(520, i), n=2, max_tokens=3, seed=i, use_eos=False))
        for i in range(3)
    }
    sampler = Sampler(store, kv_cache_bytes=1)
    outcomes: dict[str, SampleOutput] = {}
    for name, (version, request) in requests.items():
        reply = partial(outcomes.__setitem__, name)
        sampler.engine.submit(store.version(version), request, reply)
    for _ in range(100):
        if sampler.engine.busy:
            sampler.engine.step()
    for name, output in Sampler(store).run(requests).items():
        same(outcomes[name], output)


def test_no_prompt_is_begun_while_many_samples_wait(store: ModelStore, base: str) -> None:
    sampler = Sampler(store, max_batch=4)
    for i in range(10):
        prompt = random_prompt(10, i)
        sampler.engine.submit(store.version(base), ask(prompt, n=2, max_tokens=50), lambda o: None)
    sampler.engine.step()
    assert sampler.engine.num_running == 4
    assert len(sampler.engine.scheduler.ready) * 2 <= 1.2 * 4 + 2
    assert len(sampler.engine.scheduler.waiting) > 4


# ---- the pool itself


@pytest.fixture
def pool(store: ModelStore) -> BlockPool:
    return BlockPool(store.base("tiny").config, torch.float32, torch.device("cpu"), 4)


def test_the_least_recently_used_block_is_evicted_first(pool: BlockPool) -> None:
    digests = block_digests("v", "", list(range(64)))
    blocks = pool.allocate(4)
    for block, digest in zip(blocks, digests, strict=True):
        pool.register(block, "v", digest)
    pool.free(blocks)
    assert pool.find(digests[:1]) == blocks[:1]
    pool.free(blocks[:1])
    taken = pool.allocate(2)
    assert blocks[0] not in taken  # used last; and the ends go before the beginnings
    assert taken == [blocks[3], blocks[2]]


def test_a_block_with_a_holder_is_never_evicted(pool: BlockPool) -> None:
    held = pool.allocate(3)
    assert pool.allocate(2) is None
    assert pool.num_available == 1
    pool.free(held)
    assert pool.num_available == 4


def test_a_begun_block_is_found_by_what_it_begins_with_until_it_is_evicted(
    pool: BlockPool,
) -> None:
    before = digest_before("v", "")
    (block,) = pool.allocate(1) or []
    pool.register_beginning(block, "v", before, [5, 6, 7])
    pool.free([block])
    assert pool.num_available == 4
    assert pool.find_beginning(before, [5, 6, 8]) == (block, 2)
    pool.free([block])
    assert pool.find_beginning(before, [4, 6]) is None
    assert pool.find_beginning(digest_before("w", ""), [5]) is None
    taken = pool.allocate(4) or []
    assert sorted(taken) == [0, 1, 2, 3]
    assert pool.find_beginning(before, [5]) is None
    pool.free(taken)
    assert pool.num_available == 4


def test_of_two_blocks_behind_one_prefix_the_later_one_is_found(pool: BlockPool) -> None:
    before = digest_before("v", "")
    first, second = pool.allocate(2) or []
    pool.register_beginning(first, "v", before, [5, 6])
    pool.free([first])
    pool.register_beginning(second, "v", before, [8])
    pool.free([second])
    assert pool.find_beginning(before, [5]) is None
    assert pool.find_beginning(before, [8]) == (second, 1)
    pool.free([second])
    # A full block that is found by its own digest too stays, whatever is registered at its place.
    (digest,) = block_digests("v", "", list(range(16)))
    pool.register(second, "v", digest)
    third = (pool.allocate(1) or [])[0]
    pool.register_beginning(third, "v", before, [9])
    pool.free([third])
    assert pool.find([digest]) == [second]
    pool.free([second])
    pool.forget("v")
    assert pool.find([digest]) == []
    assert pool.find_beginning(before, [9]) is None
    assert len(set(pool.allocate(4) or [])) == 4


def test_a_digest_covers_the_version_the_salt_and_all_tokens_before() -> None:
    tokens = list(range(48))
    whole = block_digests("v", "", tokens)
    assert whole[:2] == block_digests("v", "", tokens[:40])
    assert whole[1] != block_digests("w", "", tokens)[1]
    assert set(whole).isdisjoint(block_digests("v", "ann", tokens))
    assert block_digests("v", "", [99, *tokens[1:]])[2] != whole[2]
    assert block_digests("v", "", tokens, block_digests("v", "", tokens[:16])) == whole


# ---- without a compiler


def test_without_a_compiler_the_plain_pass_serves(
    store: ModelStore, base: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tinkercloud.embedded.native import compiler

    compiler.library.cache_clear()
    try:
        monkeypatch.setenv("CC", str(tmp_path / "none"))
        assert compiler.library() is None
        assert Sampler(store).one(base, ask(PROMPT)).sequences
    finally:
        monkeypatch.undo()
        compiler.library.cache_clear()
