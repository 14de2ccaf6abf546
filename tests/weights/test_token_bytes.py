"""Tokens as the bytes they stand for, and bytes as tokens, for both kinds of tokenizer."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.tokenizers_made import TEXT, byte_level, metaspace, sentencepiece, words_in_pieces
from tinkercloud.errors import ConfigError
from tinkercloud.weights.token_bytes import TokenBytes, TokenizerPair, whole_characters

KINDS = {
    "bytes": byte_level(256),
    "few merges": byte_level(300),
    "many merges": byte_level(700),
    "sentencepiece": words_in_pieces(),
    "sentencepiece without a space": sentencepiece(["\u2581", "a", "\u2581a"], adds_space=False),
}


@pytest.fixture(params=KINDS, ids=str)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]


def test_tokens_stand_for_the_text_that_they_decode_to(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert TokenBytes(tokenizer).joined(tokens).removeprefix(b" ").decode() == TEXT
    assert tokenizer.decode(tokens) == TEXT


def test_any_bytes_come_back_whole(tokenizer: Tokenizer) -> None:
    both = TokenBytes(tokenizer)
    generator = np.random.default_rng(0)
    for length in (0, 1, 2, 3, 7, 200):
        for _ in range(10):
            wanted = generator.integers(0, 256, length, np.uint8).tobytes()
            assert both.joined(both.encode(wanted)) == wanted
    for cut in range(len(TEXT[:150].encode())):
        assert both.joined(both.encode(TEXT.encode()[cut:150])) == TEXT.encode()[cut:150]


def test_a_text_is_encoded_as_the_tokenizer_does(tokenizer: Tokenizer) -> None:
    both = TokenBytes(tokenizer)
    assert both.encode_beginning(TEXT.encode()) == tokenizer.encode(TEXT).ids
    plain = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert both.encode(both.joined(plain)) == plain


def test_the_middle_of_a_text_gets_no_space() -> None:
    pieces = TokenBytes(words_in_pieces())
    assert pieces.joined(pieces.encode_beginning(b"one two")) == b" one two"
    assert pieces.joined(pieces.encode(b"one two")) == b"one two"
    once = pieces.encode_beginning(b" one two")
    assert once == pieces.encode_beginning(b"one two"), "the space that another put there"


def test_pieces_without_bytes_are_read_and_written_too() -> None:
    tokenizer = metaspace(300)
    both = TokenBytes(tokenizer)
    text = TEXT.split("\n")[3].encode()
    assert both.encode_beginning(text) == tokenizer.encode(text.decode()).ids
    assert both.joined(both.encode_beginning(text)) == b" " + text
    assert both.joined(both.encode(text)) == text
    assert both.encode(b"\xff") == [], "there is no token for it"


def test_what_every_text_begins_with_is_there_once() -> None:
    pieces = TokenBytes(words_in_pieces(), spoken={"<s>"})
    assert pieces.encode_beginning(b"one")[0] == 1
    assert pieces.encode_beginning(b"<s>one").count(1) == 1
    assert pieces.encode_beginning(b"") == [1]
    assert 1 not in pieces.encode(b"one")


def test_special_tokens_are_text_where_both_tokenizers_have_them() -> None:
    ours, theirs = byte_level(300, ("<eos>", "<|end|>")), byte_level(400, ("<|end|>", "<pad>"))
    pair = TokenizerPair.of(ours, theirs)
    assert pair.target.of(ours.token_to_id("<|end|>")) == b"<|end|>"
    assert pair.target.of(ours.token_to_id("<eos>")) == b""
    assert pair.draft.of(theirs.token_to_id("<pad>")) == b""
    assert pair.draft.encode(b"<|end|>") == [theirs.token_to_id("<|end|>")]


def test_added_tokens_that_are_not_special_are_text() -> None:
    tokenizer = byte_level(256)
    tokenizer.add_tokens([AddedToken("<tab> é")])
    assert TokenBytes(tokenizer).of(tokenizer.token_to_id("<tab> é")) == "<tab> é".encode()


def test_an_id_without_a_token_stands_for_nothing(tokenizer: Tokenizer) -> None:
    assert TokenBytes(tokenizer).of(tokenizer.get_vocab_size() + 5) == b""


def test_a_tokenizer_that_cuts_and_pads_its_texts_is_read_without_that() -> None:
    tokenizer = byte_level(300)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9)
    assert TokenBytes(tokenizer).encode_beginning(TEXT.encode()) == byte_level(300).encode(TEXT).ids
    assert len(tokenizer.encode(TEXT).ids) == 9, "its own settings stay"


def test_other_kinds_of_tokenizers_are_refused() -> None:
    words = Tokenizer(models.WordPiece({"one": 0, "##s": 1}, unk_token="one"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    with pytest.raises(ConfigError, match="neither byte-level nor SentencePiece"):
        TokenBytes(words)


def test_the_end_of_whole_characters_is_where_a_strict_decoder_stops() -> None:
    text = "aé日🙂".encode()
    for end in range(len(text) + 1):
        expected = max(n for n in range(end + 1) if is_text(text[:n]))
        assert whole_characters(text[:end]) == expected
    assert whole_characters(b"a\x82") == 2, "bytes that begin no character do not wait for its end"


def is_text(data: bytes) -> bool:
    try:
        return data.decode() is not None
    except UnicodeDecodeError:
        return False
