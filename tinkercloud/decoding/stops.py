"""Where a sample ends: end-of-sequence ids, stop ids, stop strings."""

from typing import Protocol

from tinkercloud.core.types import SamplingParams


class Decoder(Protocol):
    def decode(self, ids: list[int], skip_special_tokens: bool = ...) -> str: ...


class StopRule:
    """Decides after every token whether the sample ends with it.

    A stop string is looked for in the text of the last tokens only: a token gives at least one
    byte and a character takes at most four, so 4 x length + 8 tokens always cover the string, and
    an earlier occurrence would have ended the sample when it was completed.
    """

    def __init__(self, params: SamplingParams, eos_ids: tuple[int, ...], decoder: Decoder | None):
        self._ids = frozenset(params.stop_token_ids) | (
            frozenset(eos_ids) if params.use_eos else frozenset()
        )
        self._strings = params.stop_strings
        self._decoder = decoder
        self._window = 4 * max((len(s.encode()) for s in self._strings), default=0) + 8

    def ends(self, tokens: list[int], first: int = 0) -> bool:
        """tokens: all so far, the newest last; from `first` on they were sampled."""
        if tokens[-1] in self._ids:
            return True
        if not self._strings or self._decoder is None:
            return False
        text = self._decoder.decode(
            tokens[max(first, len(tokens) - self._window) :], skip_special_tokens=False
        )
        return any(s in text for s in self._strings)
