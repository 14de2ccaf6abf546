"""Where a sample ends: end-of-sequence ids, stop ids, stop strings."""

from typing import Protocol

from tinkercloud.core.types import SamplingParams

REPLACEMENT = "\ufffd"  # what decoders give for a part of a character


class Decoder(Protocol):
    def decode(self, ids: list[int], skip_special_tokens: bool = ...) -> str: ...


class StopRule:
    """Decides after every token whether the sample ends with it.

    A stop string is looked for in the text of the last tokens only: a token gives at least one
    byte and a character takes at most four, so 4 x length + 8 tokens always cover the string, and
    an earlier occurrence would have ended the sample when it was completed. So too it is not looked
    for where the newest token cannot complete it: its text has none of the strings' last
    characters, and is whole. That holds for characters of one byte, which no token has a part of;
    and not for spaces, which decoders leave out at the beginning of a text.
    """

    def __init__(self, params: SamplingParams, eos_ids: tuple[int, ...], decoder: Decoder | None):
        self._ids = frozenset(params.stop_token_ids) | (
            frozenset(eos_ids) if params.use_eos else frozenset()
        )
        self._strings = params.stop_strings
        self._decoder = decoder
        self._window = 4 * max((len(s.encode()) for s in self._strings), default=0) + 8
        lasts = {s[-1:] for s in self._strings}
        self._lasts = lasts if all(c.isascii() and c.strip(" ") for c in lasts) else None
        self._may_complete: dict[int, bool] = {}  # by token

    def ends(self, tokens: list[int], first: int = 0) -> bool:
        """tokens: all so far, the newest last; from `first` on they were sampled."""
        if tokens[-1] in self._ids:
            return True
        decoder = self._decoder
        if not self._strings or decoder is None or not self._may_end(decoder, tokens[-1]):
            return False
        text = decoder.decode(
            tokens[max(first, len(tokens) - self._window) :], skip_special_tokens=False
        )
        return any(s in text for s in self._strings)

    def _may_end(self, decoder: Decoder, token: int) -> bool:
        """Whether a stop string may end with this token. It takes a tenth of decoding the last
        ones."""
        if self._lasts is None:
            return True
        if token not in self._may_complete:
            text = decoder.decode([token], skip_special_tokens=False)
            self._may_complete[token] = any(c in text for c in (*self._lasts, REPLACEMENT))
        return self._may_complete[token]
