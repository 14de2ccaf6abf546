"""A text in another tokenizer's tokens: in parts as at once; only its end is encoded again."""

from itertools import pairwise

import numpy as np
import pytest

from tests.tokenizers_made import TEXT, byte_level, words_in_pieces
from tinkercloud.embedded.drafting.retokenizer import MOST_LOOK_BACK, IncrementalRetokenizer
from tinkercloud.weights.token_bytes import TokenBytes, whole_characters

KINDS = {
    "bytes": TokenBytes(byte_level(256)),
    "merges": TokenBytes(byte_level(600)),
    "sentencepiece": TokenBytes(words_in_pieces()),
}


@pytest.fixture(params=KINDS, ids=str)
def tokenizer(request: pytest.FixtureRequest) -> TokenBytes:
    return KINDS[request.param]


def parts(text: bytes, seed: int) -> list[bytes]:
    """Of one to six bytes, so that they end inside words and inside characters."""
    generator = np.random.default_rng(seed)
    cuts = np.cumsum(generator.integers(1, 7, len(text)))
    edges = [0, *cuts[cuts < len(text)].tolist(), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("seed", range(3))
def test_a_text_in_parts_has_the_tokens_of_the_whole(tokenizer: TokenBytes, seed: int) -> None:
    text = IncrementalRetokenizer(tokenizer)
    for part in parts(TEXT.encode(), seed):
        text.append(part)
    assert text.tokens == tokenizer.encode_beginning(TEXT.encode())
    assert text.partial == b""


def test_the_bytes_of_a_partial_character_wait(tokenizer: TokenBytes) -> None:
    text, data = IncrementalRetokenizer(tokenizer), b""
    for byte in "é 🙂!".encode():
        text.append(bytes([byte]))
        data += bytes([byte])
        whole = whole_characters(data)
        assert text.partial == data[whole:]
        assert text.tokens == tokenizer.encode_beginning(data[:whole]) or not whole


def test_the_place_is_that_of_the_first_token_that_differs(tokenizer: TokenBytes) -> None:
    text = IncrementalRetokenizer(tokenizer)
    for part in parts(TEXT.encode(), 4):
        before = list(text.tokens)
        place = text.append(part)
        alike = [a == b for a, b in zip(before, text.tokens, strict=False)] + [False]
        assert place == alike.index(False)


def test_tokens_far_from_the_end_are_not_encoded_again(
    tokenizer: TokenBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = IncrementalRetokenizer(tokenizer)
    text.append(TEXT.encode() * 20)
    length, encode, sizes = len(text.tokens), tokenizer.encode, []

    def noted(data: bytes) -> list[int]:
        sizes.append(len(data))
        return encode(data)

    monkeypatch.setattr(tokenizer, "encode", noted)
    assert text.append(b" and one") >= length - MOST_LOOK_BACK
    assert sizes and max(sizes) < 40 * MOST_LOOK_BACK


def test_bytes_that_are_no_text_are_encoded_too(tokenizer: TokenBytes) -> None:
    data = np.random.default_rng(0).integers(0, 256, 400, np.uint8).tobytes()
    text = IncrementalRetokenizer(tokenizer)
    for part in parts(data, 1):
        text.append(part)
    assert (tokenizer.joined(text.tokens) + text.partial).removeprefix(b" ") == data
