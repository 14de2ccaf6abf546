"""Drafts of servers with another vocabulary, or without tokens in their API: by text."""

from collections.abc import Sequence

from tinkercloud.chat.text_model import TextCodec
from tinkercloud.errors import UpstreamAnswerInvalid
from tinkercloud.proxy.answers import json_list, json_object, only
from tinkercloud.proxy.drafters import DraftSession
from tinkercloud.proxy.upstream import Upstream
from tinkercloud.proxy.verification import RoundRequest
from tinkercloud.speculative.drafters.drafter import Draft

LOOK_BACK = 4
"""Tokens that are encoded again with a draft: it then begins with tokens that may follow them."""
MAX_CHARACTERS_A_TOKEN = 64


class TextDrafter:
    """codec: of the target, whose tokens the text becomes."""

    def __init__(self, upstream: Upstream, codec: TextCodec):
        self.name = upstream.name
        self._upstream = upstream
        self._codec = codec

    def open(self) -> DraftSession:
        return self

    async def draft(self, request: RoundRequest) -> Draft:
        body = {"prompt": self._text(request.prompt), "max_tokens": request.num_tokens}
        answer = await self._upstream.post("completions", body | {"temperature": 0})
        choice = json_object(only(json_list(answer, "choices"), "choices"), "a choice")
        text = choice.get("text")
        if not isinstance(text, str):
            raise UpstreamAnswerInvalid("a choice has no text")
        text = text[: MAX_CHARACTERS_A_TOKEN * request.num_tokens]
        return Draft(self._tokens(request.prompt[-LOOK_BACK:], text)[: request.num_tokens])

    def close(self) -> None:
        """A server keeps nothing of a sample but what it caches."""

    def _text(self, tokens: Sequence[int]) -> str:
        """Special tokens by their names."""
        codec = self._codec
        pieces = (codec.bytes_of(token) or codec.name_of(token).encode() for token in tokens)
        return b"".join(pieces).decode(errors="replace")

    def _tokens(self, before: tuple[int, ...], text: str) -> tuple[int, ...]:
        if not text:
            return ()
        tokens = tuple(self._codec.encode(self._text(before) + text, bos=False))
        if tokens[: len(before)] == before:
            return tokens[len(before) :]
        return tuple(self._codec.encode(text, bos=False))
