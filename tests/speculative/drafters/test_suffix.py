"""The suffix automaton against what counting all substrings says."""

import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.speculative.drafters.counting_drafter import occurrences
from tinkercloud.speculative.drafters.suffix import ROOT, Automaton, ContinuationRule

COUNTED = ContinuationRule(share=0.0, doubt=0.0, shorter=0.0)


def built(*texts: list[int]) -> Automaton:
    automaton = Automaton()
    for text in texts:
        automaton.write(ROOT, text)
    return automaton


def place_of(automaton: Automaton, text: list[int]) -> tuple[int, int]:
    return automaton.follow(ROOT, 0, text)


def continued(automaton: Automaton, text: list[int], most: int, share: float = 0.0) -> list[int]:
    rule = replace(COUNTED, share=share)
    return list(automaton.continuation(*place_of(automaton, text), most, rule).tokens)


def texts_of(seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    some = [generator.integers(0, 3, int(n)).tolist() for n in generator.integers(1, 40, 5)]
    return [*some, some[0][3:9] * 3]


@pytest.mark.parametrize("seed", range(12))
def test_the_place_is_the_longest_suffix_that_was_seen(seed):
    texts = texts_of(seed)
    automaton = built(*texts)
    generator = np.random.default_rng(seed + 100)
    text: list[int] = []
    state, length = ROOT, 0
    for token in generator.integers(0, 4, 60).tolist():
        text.append(token)
        state, length = automaton.follow(state, length, [token])
        assert length == next(
            n for n in range(len(text), -1, -1) if n == 0 or occurrences(texts, text[-n:])
        )


@pytest.mark.parametrize("seed", range(12))
def test_the_continuation_is_what_followed_most_often(seed):
    texts = texts_of(seed)
    automaton = built(*texts)
    for text in texts:
        for end in range(1, len(text)):
            begun = text[max(0, end - 5) : end]
            counted = Counter({x: occurrences(texts, [*begun, x]) for x in range(3)})
            if not counted.total():
                continue
            best = continued(automaton, begun, 1)
            assert counted[best[0]] == max(counted.values())
            share = counted[best[0]] / counted.total()
            assert continued(automaton, begun, 1, share + 0.01) == []
            assert continued(automaton, begun, 1, share - 0.01) == best


def test_the_confidence_is_the_share_and_less_after_few_tokens():
    automaton = built([1, 2, 3], [1, 2, 3], [1, 2, 4])
    rule = ContinuationRule(share=0.0, doubt=1.0)
    draft = automaton.continuation(*place_of(automaton, [1, 2]), 1, rule)
    assert draft.confidences == (2 / 3.5,)
    draft = automaton.continuation(*place_of(automaton, [2]), 1, rule)
    assert draft.confidences == (2 / 4,)


def test_what_followed_once_is_less_sure_where_shorter_text_went_on_otherwise():
    automaton = built([1, 9, 3], [2, 9, 4], [5, 9, 6], [7, 8, 4])
    rule = ContinuationRule(share=0.0, doubt=1.0, shorter=4.0, long=2)  # 2 of a match of two tokens
    after_9 = 1 / (3 + 1)  # what follows a 9, which something else did once more
    draft = automaton.continuation(*place_of(automaton, [1, 9]), 1, rule)
    assert draft.tokens == (3,)
    assert draft.confidences == pytest.approx([(1 + 2 * after_9) / (1 + 2)])
    unique = automaton.continuation(*place_of(automaton, [7, 8]), 1, rule)
    assert unique.confidences == pytest.approx([1 / (1 + 1 / 2)])
    longest_only = replace(rule, num_shorter=0)
    draft = automaton.continuation(*place_of(automaton, [1, 9]), 1, longest_only)
    assert draft.confidences == unique.confidences


@pytest.mark.parametrize("seed", range(6))
def test_texts_written_in_turns_are_as_texts_written_one_after_another(seed):
    texts = texts_of(seed)
    in_turns, ends = Automaton(), [ROOT] * len(texts)
    for at in range(max(map(len, texts))):
        for i, text in enumerate(texts):
            ends[i] = in_turns.write(ends[i], text[at : at + 1])
    one_by_one = built(*texts)
    assert len(in_turns) == len(one_by_one)
    for end, text in zip(ends, texts, strict=True):
        assert in_turns.length(end) == len(text)
        assert place_of(in_turns, text) == (end, len(text))


def test_a_text_seen_once_is_continued_to_its_end():
    text = list(range(50))
    automaton = built(text)
    assert continued(automaton, [7, 8, 9], 100, 0.5) == text[10:]
    assert continued(automaton, [7, 8, 9], 4, 0.5) == [10, 11, 12, 13]


def test_where_a_text_ends_what_repeats_goes_on_repeating():
    assert continued(built([1, 2, 3] * 3), [1, 2, 3], 10, 0.0) == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]
    assert continued(built([5] * 4), [5], 10, 0.0) == [5] * 10


def test_one_text_does_not_go_on_into_the_next():
    automaton = built([1, 2, 3], [4, 5, 6])
    assert continued(automaton, [2, 3], 5) == []
    assert place_of(automaton, [3, 4])[1] == 1


def test_fewer_tokens_than_the_shortest_tell_nothing():
    automaton = built([1, 2, 3, 4])
    rule = replace(COUNTED, shortest=2)
    assert automaton.continuation(*place_of(automaton, [2]), 5, rule).tokens == ()
    assert automaton.continuation(*place_of(automaton, [1, 2]), 5, rule).tokens == (3, 4)


def test_states_are_at_most_two_for_a_token():
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, 2, 300).tolist() for _ in range(5)]
    assert len(built(*texts)) <= 2 * 1500
    assert len(built([1] * 1000)) <= 2000


@pytest.mark.parametrize("num_tokens", [2, 100, 50_000])
def test_memory_is_what_is_estimated(num_tokens):
    text = np.random.default_rng(0).integers(0, num_tokens, 20_000).tolist()
    tracemalloc.start()
    automaton = built(text)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert automaton.num_bytes == pytest.approx(taken, rel=0.25)


def test_memory_of_many_short_texts_is_what_is_estimated():
    tracemalloc.start()
    automata = [built([1, 2, 3]) for _ in range(1000)]
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(automaton.num_bytes for automaton in automata) == pytest.approx(taken, rel=0.25)
