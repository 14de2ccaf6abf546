"""One sample of a chat: from chunks of tokens to the events that a client gets.

The same events make the stream and the whole answer, so both have the same text.
"""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tinkercloud.chat.call_scanner import CallPiece
from tinkercloud.chat.reasoning import ReasoningParser
from tinkercloud.chat.text_model import TextModel
from tinkercloud.chat.token_text import TokenText
from tinkercloud.chat.tool_formats import ToolParser
from tinkercloud.core.types import StopReason, TokenChunk

FINISH_REASONS = ("stop", "length", "tool_calls")


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """top: the likeliest tokens here and their log-probabilities, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """tokens: those drawn since the last delta of this sample, the ones of tool calls too."""

    index: int
    text: str = ""
    reasoning: str = ""
    tokens: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class CallDelta:
    """call: its number within the sample. name and call_id: set where it begins. arguments: more
    JSON text."""

    index: int
    call: int
    name: str | None = None
    call_id: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class SampleEnd:
    """stop: the stop string that ended the sample, where one of the request's did."""

    index: int
    finish_reason: str  # one of FINISH_REASONS
    num_tokens: int
    stop: str | None = None


Event = TextDelta | CallDelta | SampleEnd


@dataclass(frozen=True, slots=True)
class ParserOptions:
    """tool_names: empty: calls are text. one_call: further calls are dropped. end_tokens: tokens
    that end a sample and are not part of its text. prompt_end: the rendered prompt's.
    call_opening: the beginning of a tool call, which the prompt has already."""

    stops: tuple[str, ...] = ()
    tool_names: tuple[str, ...] = ()
    one_call: bool = False
    end_tokens: frozenset[int] = frozenset()
    prompt_end: str = ""
    call_opening: str = ""
    reasoning: bool = True


class SampleParser:
    def __init__(self, index: int, model: TextModel, options: ParserOptions):
        self._index = index
        self._options = options
        self._text = TokenText(model.codec, options.stops)
        self._reasoning: ReasoningParser | None = None
        if model.reasoning is not None and options.reasoning:
            self._reasoning = ReasoningParser(model.reasoning, options.prompt_end)
        self._tools: ToolParser | None = None
        if options.tool_names:
            self._tools = model.require_tools().parser(options.tool_names)
            self._tools.feed(options.call_opening)
        self._num_calls = self._num_tokens = 0
        self.ended = False

    def feed(self, chunk: TokenChunk) -> Iterator[Event]:
        """Nothing after the end: what a backend drew beyond a stop string is dropped."""
        if self.ended:
            return
        scored = scored_tokens(chunk)
        self._num_tokens += len(scored)
        visible = [token.token for token in scored]
        if chunk.stop_reason == "stop" and visible[-1] in self._options.end_tokens:
            visible.pop()
        yield from self._events(self._text.feed(visible), scored)
        if self._text.stopped or chunk.stop_reason is not None:
            yield from self._end(chunk.stop_reason)

    def _end(self, reason: StopReason | None) -> Iterator[Event]:
        self.ended = True
        yield from self._events(self._text.finish(), ())
        if self._reasoning is not None:
            reasoning, answer = self._reasoning.finish()
            if reasoning:
                yield TextDelta(self._index, reasoning=reasoning)
            yield from self._answered(answer)
        if self._tools is not None:
            for piece in self._tools.finish():
                yield from self._piece(piece)
        finish = "length" if reason == "length" and not self._text.stopped else "stop"
        if finish == "stop" and self._num_calls:
            finish = "tool_calls"
        yield SampleEnd(self._index, finish, self._num_tokens, self._text.stop)

    def _events(self, text: str, tokens: Sequence[ScoredToken]) -> Iterator[Event]:
        reasoning = ""
        if self._reasoning is not None and text:
            reasoning, text = self._reasoning.feed(text)
        if self._tools is None:
            if text or reasoning or tokens:
                yield TextDelta(self._index, text, reasoning, tuple(tokens))
            return
        if reasoning or tokens:
            yield TextDelta(self._index, "", reasoning, tuple(tokens))
        yield from self._answered(text)

    def _answered(self, text: str) -> Iterator[Event]:
        if self._tools is None:
            if text:
                yield TextDelta(self._index, text)
            return
        for piece in self._tools.feed(text) if text else ():
            yield from self._piece(piece)

    def _piece(self, piece: str | CallPiece) -> Iterator[Event]:
        if isinstance(piece, str):
            yield TextDelta(self._index, piece)
            return
        self._num_calls += piece.name is not None
        if not (self._options.one_call and self._num_calls > 1):
            call_id = None if piece.name is None else f"call_{uuid.uuid4().hex}"
            call = self._num_calls - 1
            yield CallDelta(self._index, call, piece.name, call_id, piece.arguments)


def scored_tokens(chunk: TokenChunk) -> tuple[ScoredToken, ...]:
    tokens, logprobs, topk = chunk.tokens.tolist(), chunk.logprobs.tolist(), chunk.topk
    if topk is None:
        return tuple(map(ScoredToken, tokens, logprobs))
    tops = [
        tuple(zip(ids, values, strict=True))
        for ids, values in zip(topk.token_ids.tolist(), topk.logprobs.tolist(), strict=True)
    ]
    return tuple(map(ScoredToken, tokens, logprobs, tops))
