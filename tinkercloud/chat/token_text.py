"""A sample's tokens as text, while they come."""

import codecs
from collections.abc import Iterable, Sequence

from tinkercloud.chat.markers import held_back
from tinkercloud.chat.text_model import TextCodec


class TokenText:
    """Whole characters only, and nothing of a stop string: what may be the beginning of either
    waits for the next tokens. The pieces joined are the text of all tokens together.

    A stop string ends the text; what comes after it is dropped. stop: the one that did."""

    def __init__(self, codec: TextCodec, stops: Sequence[str] = ()):
        self._codec = codec
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stop: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def feed(self, tokens: Iterable[int]) -> str:
        return self._piece(self._decoder.decode(b"".join(map(self._codec.bytes_of, tokens))))

    def finish(self) -> str:
        """What was held back: the sample has ended."""
        piece = self._piece(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return piece if self.stopped else piece + rest

    def _piece(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        matches = [(place, s) for s in self._stops if (place := self._held.find(s)) >= 0]
        if matches:
            place, self.stop = min(matches)
            piece, self._held = self._held[:place], ""
            return piece
        ready = len(self._held) - held_back(self._held, self._stops)
        piece, self._held = self._held[:ready], self._held[ready:]
        return piece
