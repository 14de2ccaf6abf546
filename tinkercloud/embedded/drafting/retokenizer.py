"""A sample's text in another tokenizer's tokens, told again as the sample grows."""

from tinkercloud.weights.token_bytes import TokenBytes, whole_characters

LOOK_BACK = 4  # tokens before the end that more text may join
MOST_LOOK_BACK = 32  # tokens before the end within which the start of a word is looked for

_CONTINUES, _BEGINS = b"\x80", b"\xc0"  # first bytes between them continue a character (UTF-8)


class IncrementalRetokenizer:
    """tokens: of the text's whole characters. held: the bytes after them, of a character that is
    not whole yet."""

    def __init__(self, tokenizer: TokenBytes):
        self._tokenizer = tokenizer
        self.tokens: list[int] = []
        self.held = b""

    def append(self, text: bytes) -> int:
        """More of the text. The place from which on tokens are new, or others than before; what is
        more than MOST_LOOK_BACK before the end stays as it is."""
        text = self.held + text
        whole = whole_characters(text)
        self.held = text[whole:]
        place = self._place()
        before = self.tokens[place:]
        window = self._tokenizer.joined(before) + text[:whole]
        encode = self._tokenizer.encode if place else self._tokenizer.encode_beginning
        self.tokens[place:] = encode(window) if whole else before
        return place + _num_alike(before, self.tokens[place:])

    def _place(self) -> int:
        """Where to begin to encode again: words are cut into tokens apart from one another, so at
        the start of one; where there is none, as in Chinese, at that of a character."""
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


def _num_alike(some: list[int], others: list[int]) -> int:
    count = 0
    while count < min(len(some), len(others)) and some[count] == others[count]:
        count += 1
    return count
