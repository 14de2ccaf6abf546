"""Stop strings: found with the token that completes them, whatever text the tokens are cut into."""

import random
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from tests.tokenizers_made import TEXT, byte_level, metaspace, words_in_pieces
from tinkercloud.core.types import SamplingParams
from tinkercloud.decoding.stops import StopRule

STOPS = ("\n\n", "n", "em.", "🙂", "two t", "é", "s) ", " ", "日本", "x", "</end>", "ee\n", "7 =")


def first_end(tokenizer: Tokenizer, tokens: list[int], strings: tuple[str, ...]) -> int | None:
    """By the whole text of each beginning."""
    for num in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:num], skip_special_tokens=False)
        if any(string in text for string in strings):
            return num
    return None


def end_by_rule(tokenizer: Tokenizer, tokens: list[int], strings: tuple[str, ...]) -> int | None:
    rule = StopRule(SamplingParams(9, 0, stop_strings=strings, use_eos=False), (), tokenizer)
    return next((n for n in range(1, len(tokens) + 1) if rule.ends(tokens[:n])), None)


def any_text(choices: random.Random) -> str:
    cuts = [choices.randrange(len(TEXT)) for _ in range(6)]
    return "".join(TEXT[at : at + choices.randrange(1, 12)] for at in cuts)


@pytest.mark.parametrize("make", [lambda: byte_level(300), words_in_pieces, lambda: metaspace(90)])
def test_a_stop_string_ends_a_sample_where_its_text_has_it_first(
    make: Callable[[], Tokenizer],
) -> None:
    tokenizer, choices, num_found = make(), random.Random(0), 0
    for _ in range(150):
        tokens = tokenizer.encode(any_text(choices), add_special_tokens=False).ids
        strings = tuple(choices.sample(STOPS, choices.randrange(1, 3)))
        expected = first_end(tokenizer, tokens, strings)
        num_found += expected is not None
        assert end_by_rule(tokenizer, tokens, strings) == expected
    assert 30 < num_found < 150


def test_a_stop_string_is_found_among_any_bytes() -> None:
    tokenizer, choices = byte_level(300), random.Random(1)
    for _ in range(150):
        tokens = [choices.randrange(300) for _ in range(60)]
        strings = tuple(choices.sample(STOPS, 2))
        assert end_by_rule(tokenizer, tokens, strings) == first_end(tokenizer, tokens, strings)


def test_a_token_that_cannot_complete_a_stop_string_is_decoded_once() -> None:
    tokenizer = byte_level(300)

    calls: list[list[int]] = []

    class Counted:
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            calls.append(ids)
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    params = SamplingParams(9, 0, stop_strings=("\n\n",), use_eos=False)
    rule = StopRule(params, (), Counted())
    tokens = tokenizer.encode("ab" * 50, add_special_tokens=False).ids
    for num in range(1, len(tokens) + 1):
        assert not rule.ends(tokens[:num])
    assert sorted(calls) == [[token] for token in sorted(set(tokens))]
