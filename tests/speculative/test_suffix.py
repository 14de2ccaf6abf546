"""The suffix automaton against what counting all substrings says."""

from collections import Counter

import numpy as np
import pytest

from tinkercloud.speculative.suffix import Automaton, Place


def built(*texts: list[int]) -> Automaton:
    automaton = Automaton()
    for text in texts:
        automaton.begin()
        for token in text:
            automaton.add(token)
    return automaton


def after(automaton: Automaton, text: list[int]) -> Place:
    place = Place()
    for token in text:
        place = automaton.follow(place, token)
    return place


def texts_of(seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    some = [generator.integers(0, 3, int(n)).tolist() for n in generator.integers(1, 40, 5)]
    return [*some, some[0][3:9] * 3]


def occurrences(texts: list[list[int]], text: list[int]) -> int:
    n = len(text)
    return sum(t[i : i + n] == text for t in texts for i in range(len(t) - n + 1))


@pytest.mark.parametrize("seed", range(12))
def test_the_place_is_the_longest_suffix_that_was_seen(seed):
    texts = texts_of(seed)
    automaton = built(*texts)
    generator = np.random.default_rng(seed + 100)
    text: list[int] = []
    place = Place()
    for token in generator.integers(0, 4, 60).tolist():
        text.append(token)
        place = automaton.follow(place, token)
        longest = next(
            n for n in range(len(text), -1, -1) if n == 0 or occurrences(texts, text[-n:])
        )
        assert place.length == longest


@pytest.mark.parametrize("seed", range(12))
def test_the_continuation_is_what_followed_most_often(seed):
    texts = texts_of(seed)
    automaton = built(*texts)
    for text in texts:
        for end in range(1, len(text)):
            begun = text[max(0, end - 5) : end]
            place = after(automaton, begun)
            followed = Counter(
                {
                    x: occurrences(texts, [*begun, x])
                    for x in range(3)
                    if occurrences(texts, [*begun, x])
                }
            )
            told = automaton.continuation(place, 1, 0.0)
            if not followed:
                assert told == []
                continue
            assert followed[told[0]] == max(followed.values())
            share = followed[told[0]] / sum(followed.values())
            assert automaton.continuation(place, 1, share + 0.01) == []
            assert automaton.continuation(place, 1, share - 0.01) == told


def test_a_text_seen_once_is_continued_to_its_end():
    text = list(range(50))
    automaton = built(text)
    assert automaton.continuation(after(automaton, [7, 8, 9]), 100, 0.5) == text[10:]
    assert automaton.continuation(after(automaton, [7, 8, 9]), 4, 0.5) == [10, 11, 12, 13]


def test_one_text_does_not_go_on_into_the_next():
    automaton = built([1, 2, 3], [4, 5, 6])
    assert automaton.continuation(after(automaton, [2, 3]), 5, 0.0) == []
    assert after(automaton, [3, 4]).length == 1


def test_states_are_at_most_two_for_a_token():
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, 2, 300).tolist() for _ in range(5)]
    assert len(built(*texts)) <= 2 * 1500
    assert len(built([1] * 1000)) <= 2000
