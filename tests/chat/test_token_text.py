"""Text of tokens as they come: whole characters, no stop strings, the same text in all."""

import random

import pytest

from tests.tokenizers_made import TEXT, byte_level, metaspace
from tinkercloud.chat.markers import held_back
from tinkercloud.chat.reasoning import ReasoningParser, reasoning_format
from tinkercloud.chat.text_model import NumberCodec, TokenizerCodec
from tinkercloud.chat.token_text import TokenText
from tinkercloud.errors import InvalidRequest


@pytest.mark.parametrize("size", [257, 400])
@pytest.mark.parametrize("seed", range(6))
def test_the_pieces_joined_are_the_decoded_text(size: int, seed: int) -> None:
    tokenizer = byte_level(size)
    choices = random.Random(seed)
    tokens = tokenizer.encode(TEXT).ids + choices.choices(range(size), k=200)
    codec, pieces, place = TokenizerCodec(tokenizer), [], 0
    text = TokenText(codec)
    while place < len(tokens):
        step = choices.randint(1, 4)
        pieces.append(text.feed(tokens[place : place + step]))
        place += step
    pieces.append(text.finish())
    assert "".join(pieces) == tokenizer.decode(tokens)
    whole = len(tokenizer.encode(TEXT).ids)
    assert not any("\ufffd" in piece for piece in pieces[: whole // 4])


@pytest.mark.parametrize("stop", ["café", "owner", "🙂👩", "\n\n", "three items"])
def test_nothing_of_a_stop_string_is_given(stop: str) -> None:
    tokenizer = byte_level(300)
    text = TokenText(TokenizerCodec(tokenizer), (stop, "never"))
    pieces = [text.feed([token]) for token in tokenizer.encode(TEXT).ids]
    assert "".join(pieces) + text.finish() == TEXT.partition(stop)[0]
    assert text.stop == stop


def test_the_beginning_of_a_stop_string_is_given_when_another_text_follows() -> None:
    text = TokenText(NumberCodec(), ("1 2 4",))
    assert [text.feed([t]) for t in (1, 2, 3)] == ["", "", "1 2 3 "]


def test_a_model_without_a_tokenizer_takes_numbers() -> None:
    assert NumberCodec().encode(" 12 7\n3 ", bos=True) == [12, 7, 3]
    with pytest.raises(InvalidRequest, match="token ids"):
        NumberCodec().encode("twelve", bos=True)


def test_only_the_beginning_of_a_marker_is_held_back() -> None:
    assert held_back("a <tool", ("<tool_call>",)) == 5
    assert held_back("a <tool_call>", ("<tool_call>",)) == 0
    assert held_back("aab", ("abc", "bx")) == 2


@pytest.mark.parametrize(
    ("prompt_end", "text", "expected"),
    [
        ("", "<think>\nhm, \n</think>\n\nYes.", ("hm,", "Yes.")),
        ("<think>\n", "hm</think>Yes.", ("hm", "Yes.")),
        ("", "\nYes <think>", ("", "\nYes <think>")),
        ("", "<think>never ends ", ("never ends", "")),
        ("", "<thi", ("", "<thi")),
    ],
)
def test_reasoning_is_told_from_the_answer(
    prompt_end: str, text: str, expected: tuple[str, str]
) -> None:
    form = reasoning_format("{{ '</think>' }}")
    assert form is not None
    for pieces in ([text], list(text)):
        parser = ReasoningParser(form, prompt_end)
        parts = [*(parser.feed(piece) for piece in pieces), parser.finish()]
        assert ("".join(p[0] for p in parts), "".join(p[1] for p in parts)) == expected


def test_a_template_without_reasoning_has_none() -> None:
    assert reasoning_format("{{ messages }}") is None


@pytest.mark.parametrize("seed", range(4))
def test_texts_of_a_sentencepiece_tokenizer_are_those_it_decodes(seed: int) -> None:
    """But for the blank at the beginning, which it drops from whole texts only."""
    tokenizer = metaspace(300)
    tokens = tokenizer.encode(TEXT).ids
    place = random.Random(seed).randrange(1, len(tokens) - 40)
    text = TokenText(TokenizerCodec(tokenizer))
    pieces = [text.feed([token]) for token in tokens[place : place + 40]]
    joined = "".join(pieces) + text.finish()
    assert joined.removeprefix(" ") == tokenizer.decode(tokens[place : place + 40]).removeprefix(
        " "
    )
