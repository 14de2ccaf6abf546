"""A drafter that fails, lies or dies costs drafts, and nothing else."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.speculative.drafters.streams import stream, written
from tests.speculative.drafters.trial_drafters import (
    DyingDrafter,
    GarbageDrafter,
    LateDrafter,
    RandomDrafter,
    WrongDrafter,
)
from tinkercloud.speculative.drafters.draft_distribution import DraftDistribution
from tinkercloud.speculative.drafters.drafter import Draft, Drafter, Stream
from tinkercloud.speculative.drafters.guarded_drafter import NUM_EXCEPTIONS, GuardedDrafter
from tinkercloud.speculative.drafters.suffix_drafter import SuffixDrafter

V = 50
TEXT = list(range(10, 40)) * 4
LAW = DraftDistribution(np.array([1, 2], np.int32), np.array([0.5, 0.5], np.float32))
HALF = DraftDistribution(np.array([1, 2], np.int32), np.array([0.5, 0.1], np.float32))


class Answering(Drafter):
    """Says one thing, whatever it is asked."""

    def __init__(self, answer: Any):
        self._answer = answer

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("an error that cannot be told")


def is_allowed(draft: Draft, most: int) -> bool:
    return (
        len(draft.tokens) == len(draft.confidences)
        and len(draft.tokens) <= most
        and all(type(token) is int and 0 <= token < V for token in draft.tokens)
        and all(type(c) is float and 0 <= c <= 1 for c in draft.confidences)
    )


def asked_once(drafter: Drafter, most: int = 3) -> tuple[Draft, dict[str, int]]:
    guard, sample = GuardedDrafter(drafter, V), stream(0, [1, 2])
    guard.begin(sample)
    (draft,) = guard.propose([(sample, most)])
    return draft, dict(guard.num_refused)


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        ([Draft((1, 2, 3, 4), (1.0,) * 4)], "length"),
        ([Draft((1, 2), (1.0,))], "length"),
        ([Draft((1, V), (1.0, 1.0))], "vocabulary"),
        ([Draft((-1,), (1.0,))], "vocabulary"),
        ([Draft((1,), (float("nan"),))], "confidence"),
        ([Draft((1,), (float("inf"),))], "confidence"),
        ([Draft((1,), (1.5,))], "confidence"),
        ([Draft((1,), ("high",))], "form"),
        ([Draft((1, 2), (0.5, 0.5), (LAW,))], "law"),
        ([Draft((1,), (0.5,), (LAW, LAW))], "law"),
        ([Draft((1, 3), (0.5, 0.5), (LAW, LAW))], "law"),
        ([Draft((1,), (0.5,), (HALF,))], "law"),
        ([Draft((), (), (LAW,))], "law"),
        ([Draft((1,), (0.5,), [LAW])], "form"),
        ([Draft((1,), (0.5,), (None,))], "form"),
        ([Draft((1,), (0.5,), (DraftDistribution([1], [1.0]),))], "form"),
        ([Draft((1.0,), (1.0,))], "form"),
        ([Draft([1], (1.0,))], "form"),
        ([(1, 2)], "form"),
        ([None], "form"),
        ([], "answer"),
        ([Draft(), Draft()], "answer"),
        (None, "answer"),
        (KeyError("lost"), "exception"),
        (Unspeakable(), "exception"),
    ],
)
def test_what_is_not_allowed_becomes_an_empty_draft_and_is_counted(answer, wrong):
    assert asked_once(Answering(answer)) == (Draft(), {wrong: 1})


def test_what_is_allowed_passes():
    good = Draft((0, V - 1, 7), (1.0, 0.0, 0.5))
    assert asked_once(Answering([good])) == (good, {})
    assert asked_once(Answering([Draft()])) == (Draft(), {})
    audited = Draft((1, 2), (0.5, 0.5), (LAW, LAW))
    assert asked_once(Answering([audited])) == (audited, {})


def test_one_bad_draft_does_not_spoil_the_others():
    good, bad = Draft((1,), (0.5,)), Draft((V,), (0.5,))
    guard = GuardedDrafter(Answering([good, bad, good]), V)
    samples = [stream(i, [1]) for i in range(3)]
    for sample in samples:
        guard.begin(sample)
    assert guard.propose([(sample, 2) for sample in samples]) == [good, Draft(), good]


def test_a_guarded_drafter_drafts_as_it_does_unguarded():
    plain = written(SuffixDrafter(), [(stream(0, [1, 2]), TEXT)])
    guard = GuardedDrafter(SuffixDrafter(), V)
    assert written(guard, [(stream(0, [1, 2]), TEXT)]).drafts == plain.drafts
    assert plain.accepted > 0
    assert not guard.num_refused


@pytest.mark.parametrize("num_good", range(0, 30, 3))
def test_a_drafter_that_dies_is_switched_off_and_the_sample_is_finished(num_good):
    guard, sample = GuardedDrafter(DyingDrafter(SuffixDrafter(), num_good), V), stream(0, [1, 2])
    for other in range(1, 4):
        guard.begin(stream(other, [3]))
    written(guard, [(sample, TEXT)])
    assert sample.tokens[2:] == TEXT
    for other in range(1, 4):
        guard.end(stream(other, [3]))
    assert guard.num_refused["exception"] == NUM_EXCEPTIONS
    assert guard.off_reason == "3 exceptions, the last RuntimeError: the drafter is dead"


def test_a_drafter_that_is_off_is_not_asked_again():
    class Counting(Answering):
        num_asked = 0

        def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
            self.num_asked += 1
            return super().propose(requests)

    drafter, sample = Counting(Unspeakable()), stream(0, [1])
    guard = GuardedDrafter(drafter, V)
    guard.begin(sample)
    for _ in range(10):
        assert guard.propose([(sample, 2)]) == [Draft()]
    assert drafter.num_asked == NUM_EXCEPTIONS
    assert guard.off_reason


def test_a_sample_that_the_drafter_failed_to_begin_is_not_asked_for():
    guard = GuardedDrafter(DyingDrafter(RandomDrafter(V), 0), V)
    lost = stream(0, [1])
    guard.begin(lost)
    assert guard.propose([(lost, 3)]) == [Draft()]
    guard.observe(lost, 1)
    guard.end(lost)
    assert guard.num_refused == {"exception": 1}


@pytest.mark.parametrize("seed", range(30))
def test_whatever_garbage_is_drafted_every_draft_is_allowed_and_samples_are_finished(seed):
    coins = random.Random(seed)
    guard = GuardedDrafter(GarbageDrafter(V, seed), V)
    for number in range(20):
        text = coins.choices(range(V), k=coins.randrange(1, 12))
        samples = [(stream(3 * number + i, [1]), text) for i in range(coins.randrange(1, 4))]
        most = coins.randrange(0, 6)
        tally = written(guard, samples, most)
        assert all(is_allowed(draft, most) for draft in tally.drafts)
        assert all(sample.tokens[1:] == text for sample, _ in samples)
    refused = {"answer", "form", "length", "vocabulary", "confidence", "law"}
    assert refused <= set(guard.num_refused)
    assert guard.off_reason is None


def test_garbage_would_be_seen_without_a_guard():
    drafts = [
        draft
        for seed in range(30)
        for draft in GarbageDrafter(V, seed).propose([(stream(0, [1]), 3)]) or [None]
    ]
    assert not all(isinstance(d, Draft) and is_allowed(d, 3) for d in drafts)


def test_a_drafter_that_is_told_the_future_is_never_right():
    sample = stream(0, [1, 2])
    wrong = WrongDrafter(V, lambda stream: TEXT[len(stream.tokens) - 2 :])
    tally = written(wrong, [(sample, TEXT)])
    assert tally.drafted > len(TEXT)
    assert tally.accepted == 0


@pytest.mark.parametrize("drafter", [RandomDrafter(V), LateDrafter(V, 0.0), WrongDrafter(V)])
def test_useless_drafters_draft_what_is_allowed(drafter):
    guard = GuardedDrafter(drafter, V)
    tally = written(guard, [(stream(0, [1, 2]), TEXT)])
    assert tally.drafted > 0
    assert not guard.num_refused
