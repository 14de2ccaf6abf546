"""Tokens of an engine step on their way to the API process."""

from collections.abc import Callable

from tinkercloud.core.types import OnTokens, TokenChunk
from tinkercloud.embedded.process.protocol import Tokens


class TokenOutbox:
    """Collects the chunks of all calls that stream: a message for each engine step, not for each
    token, since pickling and a system call cost more than the tokens."""

    def __init__(self, send: Callable[[object], None]):
        self._send = send
        self._chunks: list[tuple[int, TokenChunk]] = []

    def of(self, call_id: int) -> OnTokens:
        """Where the chunks of a call go."""
        return lambda chunk: self._chunks.append((call_id, chunk))

    def flush(self) -> None:
        """After a step, and before a result that must come after its tokens."""
        if self._chunks:
            chunks, self._chunks = tuple(self._chunks), []
            self._send(Tokens(chunks))
