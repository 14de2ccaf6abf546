"""The store of disagreements: bounds, age, sampling, JSONL."""

import json
from collections import Counter

import numpy as np
import pytest

from tinkercloud.errors import UserError
from tinkercloud.speculative.learning.cases import Case, CaseStore, digest
from tinkercloud.speculative.learning.replay_buffer import ReplayBuffer, sample_mix

M = 4


def a_text(seed: int, length: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 900, length).astype(np.int32)


def a_case(tokens: np.ndarray, position: int, **more: object) -> Case:
    values = {
        "context": digest(tokens), "position": position, "drafted": 1, "target": 2,
        "top_ids": np.arange(M, dtype=np.int32), "top_probs": np.full(M, 0.2, np.float32),
        "temperature": 1.0, "version": "v-1", "epoch": 0, "category": "code",
    }  # fmt: skip
    return Case(**values | more)


def filled(store: CaseStore, texts: int, cases: int = 3, **more: object) -> CaseStore:
    for seed in range(texts):
        tokens = a_text(seed)
        for position in range(5, 5 + cases):
            store.add(tokens, a_case(tokens, position, **more))
    return store


def counted_bytes(store: CaseStore) -> int:
    """From the cases alone, each context once."""
    cases = [*store.disagreed, *store.agreed]
    contexts = {case.context for case in cases}
    return sum(case.num_bytes for case in cases) + sum(
        store._contexts[name][0].nbytes for name in contexts
    )


def test_a_case_gives_back_the_exact_tokens_before_it():
    store = CaseStore(10**6, 3)
    tokens = a_text(0)
    store.add(tokens, a_case(tokens, 7))
    tokens[:] = 0  # what the caller does with its array is not our business
    (case,) = store.disagreed
    assert store.tokens(case).tolist() == a_text(0)[:7].tolist()
    assert case.rest == pytest.approx(0.2)


def test_a_position_outside_of_its_context_is_refused():
    store = CaseStore(10**6, 3)
    tokens = a_text(0, 5)
    for position in (0, 6):
        with pytest.raises(ValueError, match="of 5 tokens"):
            store.add(tokens, a_case(tokens, position))
    assert store.num_bytes == 0


def test_memory_is_bounded_and_the_oldest_go_first():
    bound = 20_000
    store = CaseStore(bound, 3)
    for seed in range(200):
        tokens = a_text(seed)
        for position in range(5, 8):
            drafted = 2 if seed % 2 else 1
            store.add(tokens, a_case(tokens, position, drafted=drafted, epoch=seed))
            assert store.num_bytes <= bound
            assert store.num_bytes == counted_bytes(store)
    kept = [case.epoch for case in store.disagreed]
    assert kept == sorted(kept)
    assert kept[-1] == 198
    assert kept[0] > 150
    assert len(store.agreed) > 0
    assert store.agreed.num_bytes <= 0.2 * bound


def test_a_context_is_kept_once_and_for_as_long_as_a_case_lies_in_it():
    store = filled(CaseStore(10**6, 0), texts=1, cases=20)
    assert store._context_bytes == a_text(0).nbytes
    store.expire(1)
    assert len(store) == store.num_bytes == 0
    assert store._contexts == {}


def test_cases_of_versions_that_are_too_old_are_forgotten():
    store = CaseStore(10**6, max_age=2)
    for epoch in range(6):
        tokens = a_text(epoch)
        store.add(tokens, a_case(tokens, 5, epoch=epoch))
        store.add(tokens, a_case(tokens, 6, epoch=epoch, drafted=2))
    store.expire(5)
    assert [case.epoch for case in store.disagreed] == [3, 4, 5]
    assert [case.epoch for case in store.agreed] == [3, 4, 5]
    assert store.num_bytes == counted_bytes(store)


def test_what_is_drawn_is_mixed_as_asked_and_the_same_for_a_seed():
    store = filled(CaseStore(10**6, 3), 30)
    filled(store, 30, drafted=2)
    drawn = store.sample(100, np.random.default_rng(1))
    assert sum(not case.agreed for case in drawn) == 80
    again = store.sample(100, np.random.default_rng(1))
    other = store.sample(100, np.random.default_rng(2))
    assert all(a is b for a, b in zip(drawn, again, strict=True))
    assert any(a is not b for a, b in zip(drawn, other, strict=True))


def test_where_one_kind_is_missing_the_other_fills_in():
    generator = np.random.default_rng(0)
    only = filled(CaseStore(10**6, 3), 4)
    assert len(only.sample(10, generator)) == 10
    agreed = filled(CaseStore(10**6, 3), 4, drafted=2)
    assert len(agreed.sample(10, generator)) == 10
    assert CaseStore(10**6, 3).sample(10, generator) == []


def test_cases_survive_a_journey_through_jsonl():
    store = filled(CaseStore(10**6, 3), 5)
    filled(store, 5, drafted=2, category="prose")
    lines = list(store.lines())
    assert sum("tokens" in json.loads(line) for line in lines) == 5
    other = CaseStore(10**6, 3)
    assert other.read(lines) == 30
    assert list(other.lines()) == lines
    assert other.num_bytes == store.num_bytes
    assert Counter(case.category for case in other.disagreed) == {"code": 15}


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw.pop("context"),
        lambda raw: raw.update(top_ids=[1]),
        lambda raw: raw.update(top_probs=["x"] * M),
        lambda raw: raw.update(top_probs=[float("nan")] * M),
        lambda raw: raw.update(tokens=[1, 2]),
        lambda raw: raw.update(position=4000),
        lambda raw: raw.update(drafted=None),
    ],
)
def test_a_damaged_line_is_named(damage):
    first, second, *_ = (json.loads(x) for x in filled(CaseStore(10**6, 3), 2, 1).lines())
    damage(second)
    with pytest.raises(UserError, match="line 2 is no case"):
        CaseStore(10**6, 3).read([json.dumps(first), json.dumps(second)])
    with pytest.raises(UserError, match="line 1"):
        CaseStore(10**6, 3).read(["not json"])


def test_an_item_larger_than_the_buffer_does_not_stay():
    gone: list[Case] = []
    buffer = ReplayBuffer(100, gone.append)
    case = a_case(a_text(0), 5)
    buffer.add(case, 101)
    assert len(buffer) == buffer.num_bytes == 0
    assert gone == [case]


def test_a_mix_has_as_many_items_as_were_asked_for():
    generator = np.random.default_rng(0)
    cases = [a_case(a_text(i), 5) for i in range(4)]
    for count in range(12):
        for share in (0.0, 0.3, 0.8, 1.0):
            assert len(sample_mix(cases[:2], cases[2:], count, share, generator)) == count
