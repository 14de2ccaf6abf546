"""A sample's text in another tokenizer's tokens, encoded further as the sample grows."""

from tinkercloud.core.types import num_equal
from tinkercloud.weights.token_bytes import TokenBytes, whole_characters

LOOK_BACK = 4  # tokens before the end that more text may join
MOST_LOOK_BACK = 32  # tokens before the end within which the start of a word is looked for

_CONTINUES, _BEGINS = b"\x80", b"\xc0"  # first bytes between them continue a character (UTF-8)


class IncrementalRetokenizer:
    """tokens: of the text's whole characters. partial: the bytes after them, of a character that
    is not whole yet."""

    def __init__(self, tokenizer: TokenBytes):
        self._tokenizer = tokenizer
        self.tokens: list[int] = []
        self.partial = b""

    def append(self, text: bytes) -> int:
        """More of the text. Returns the place from which on tokens are new, or others than before;
        those more than MOST_LOOK_BACK before the end are never encoded again."""
        text = self.partial + text
        whole = whole_characters(text)
        self.partial = text[whole:]
        place = self._place()
        before = self.tokens[place:]
        window = self._tokenizer.joined(before) + text[:whole]
        encode = self._tokenizer.encode if place else self._tokenizer.encode_beginning
        self.tokens[place:] = encode(window) if whole else before
        return place + num_equal(before, self.tokens[place:])

    def _place(self) -> int:
        """Where to begin to encode again: at the start of a word, since tokenizers cut each word
        by itself; where there is none, as in Chinese, at the start of a character."""
        length = len(self.tokens)
        if length <= MOST_LOOK_BACK:
            return 0
        for place in range(length - LOOK_BACK, length - MOST_LOOK_BACK, -1):
            if self._tokenizer.of(self.tokens[place])[:1].isspace():
                return place
        place = length - LOOK_BACK
        while place > 0 and not self._begins_a_character(place):
            place -= 1
        return place

    def _begins_a_character(self, place: int) -> bool:
        return not _CONTINUES <= self._tokenizer.of(self.tokens[place])[:1] < _BEGINS
