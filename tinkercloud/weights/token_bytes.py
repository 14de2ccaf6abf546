"""A tokenizer between tokens and the bytes that they stand for.

Bytes, not characters: a token may end inside a character. Two kinds of tokenizer are known, the
byte-level one (GPT-2's letters, one for each byte) and SentencePiece's (U+2581 for a space and
"<0xNN>" for a byte that no token has).
"""

import codecs
import json
import re
from collections.abc import Collection
from dataclasses import dataclass

from tokenizers import Tokenizer

from tinkercloud.errors import ConfigError

_SPACE = "\u2581"
_STRAY = re.compile("([\udc80-\udcff]+)")  # bytes of no character, as "surrogateescape" has them
_AHEAD = "\n"  # before a text that is to be encoded as if something came before it
_LONGEST_CHARACTER = 4


def _letters() -> list[str]:
    """GPT-2's letter for each byte: its own where that can be printed, else one from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printed)]
    letters = {byte: chr(byte) for byte in printed}
    letters |= {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


_LETTERS = _letters()
_BYTES = {letter: byte for byte, letter in enumerate(_LETTERS)}


class TokenBytes:
    """spoken: the special tokens that are text, as they are written; the others have no bytes.

    Raises ConfigError for a tokenizer of another kind.
    """

    def __init__(self, tokenizer: Tokenizer, spoken: Collection[str] = ()):
        written = tokenizer.to_str()
        self._tokenizer = Tokenizer.from_str(written)  # a copy: its own may be cut or padded
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._is_byte_level = _is_byte_level(json.loads(written)["decoder"])
        self._bytes = {
            token: added.content.encode() if added.content in spoken or not added.special else b""
            for token, added in self._tokenizer.get_added_tokens_decoder().items()
        }
        single = [self._name(byte) for byte in range(256)]
        self._of_byte = [self._tokenizer.token_to_id(name) for name in single]
        self._adds_space = self.joined(self._plain("a")) == b" a"
        first = self._tokenizer.encode("a")
        self._opening = first.ids[: [*first.special_tokens_mask, 0].index(0)]

    def of(self, token: int) -> bytes:
        """b"" for a special token that is not text, and for an id that is no token."""
        if token not in self._bytes:
            self._bytes[token] = self._read(self._tokenizer.id_to_token(token) or "")
        return self._bytes[token]

    def joined(self, tokens: Collection[int]) -> bytes:
        return b"".join(map(self.of, tokens))

    def encode(self, text: bytes) -> list[int]:
        """As tokens from the middle of a text. Bytes that are no character become single bytes'
        tokens, or nothing where there are none."""
        tokens: list[int] = []
        for i, run in enumerate(_STRAY.split(text.decode("utf-8", "surrogateescape"))):
            if i % 2:
                ids = [self._of_byte[byte] for byte in run.encode("utf-8", "surrogateescape")]
                tokens += [token for token in ids if token is not None]
            elif run:
                tokens += self._within(run)
        return tokens

    def encode_beginning(self, text: bytes) -> list[int]:
        """As the first tokens of a text, after those that the tokenizer begins every text with."""
        if text and self._adds_space and not text.startswith(b" "):
            text = b" " + text  # what this tokenizer would put there
        tokens, opening = self.encode(text), self._opening
        return tokens if tokens[: len(opening)] == opening else [*opening, *tokens]

    def _within(self, text: str) -> list[int]:
        if not self._adds_space:
            return self._plain(text)
        tokens = self._plain(_AHEAD + text)
        extra, first = len(self.joined(tokens)) - len(text.encode()), 0
        while extra > 0 and first < len(tokens):
            extra -= len(self.of(tokens[first]))
            first += 1
        return tokens[first:]

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _name(self, byte: int) -> str:
        return _LETTERS[byte] if self._is_byte_level else f"<0x{byte:02X}>"

    def _read(self, name: str) -> bytes:
        if not self._is_byte_level:
            byte = re.fullmatch("<0x([0-9A-F]{2})>", name)
            return bytes.fromhex(byte[1]) if byte else name.replace(_SPACE, " ").encode()
        if all(letter in _BYTES for letter in name):
            return bytes(_BYTES[letter] for letter in name)
        return name.encode()


@dataclass(frozen=True, slots=True)
class TokenizerPair:
    """The tokenizers of a target and of its draft; special tokens are text where both have them."""

    target: TokenBytes
    draft: TokenBytes

    @classmethod
    def of(cls, target: Tokenizer, draft: Tokenizer) -> "TokenizerPair":
        """Raises ConfigError where one is of another kind."""
        spoken = _special(target) & _special(draft)
        return cls(TokenBytes(target, spoken), TokenBytes(draft, spoken))


def whole_characters(text: bytes) -> int:
    """How many of its bytes come before a character that is not whole at its end."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    decoder.decode(text[-_LONGEST_CHARACTER:])
    return len(text) - len(decoder.getstate()[0])


def _special(tokenizer: Tokenizer) -> set[str]:
    added = tokenizer.get_added_tokens_decoder().values()
    return {token.content for token in added if token.special}


def _is_byte_level(decoder: object) -> bool:
    written = json.dumps(decoder, ensure_ascii=False)
    if '"ByteLevel"' in written:
        return True
    if '"Metaspace"' in written or _SPACE in written:
        return False
    raise ConfigError("a tokenizer is neither byte-level nor SentencePiece")
