"""One answer by speculation: its tokens as events, and events in the form of OpenAI's API."""

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinkercloud.chat.answer import Answer
from tinkercloud.chat.requests import Usage
from tinkercloud.chat.sample_parser import Event, ParserOptions, SampleParser
from tinkercloud.chat.text_model import TextModel
from tinkercloud.core.types import StopReason, TokenChunk
from tinkercloud.openai_api.bodies import ChatBody, CompletionBody
from tinkercloud.openai_api.chat_answers import ChatAnswers
from tinkercloud.openai_api.completion_answers import CompletionAnswers, CompletionChoice
from tinkercloud.openai_api.requests import chat_form, completion_form
from tinkercloud.proxy.speculation import SampleTask, Speculator
from tinkercloud.proxy.verification import Sampled

Json = dict[str, Any]


@dataclass(slots=True, eq=False)
class SpeculatedAnswer:
    """`events` is read once; answer and usage are whole after it."""

    speculator: Speculator
    text: TextModel
    task: SampleTask
    options: ParserOptions
    answer: Answer = field(default_factory=lambda: Answer(0))

    @property
    def usage(self) -> Usage:
        return Usage(len(self.task.prompt), len(self.answer.tokens))

    async def events(self) -> AsyncGenerator[Event]:
        """Closing it ends what is asked of servers."""
        parser = SampleParser(0, self.text, self.options)
        left = self.task.max_tokens
        async with aclosing(self.speculator.pieces(self.task)) as pieces:
            async for piece in pieces:
                for chunk in _chunks(piece, left):
                    for event in parser.feed(chunk):
                        self.answer.add(event)
                        yield event
                if parser.ended:
                    return
                left -= len(piece.tokens)


def _chunks(piece: Sampled, left: int) -> Iterator[TokenChunk]:
    """One token in each: what comes after a stop string is not counted. left: tokens that the
    sample may still get."""
    last = len(piece.tokens) - 1
    reason: StopReason | None = "length" if left <= len(piece.tokens) else None
    reason = "stop" if piece.has_ended else reason
    for place, token in enumerate(piece.tokens):
        tokens, logprobs = np.array([token], np.int32), np.zeros(1, np.float32)
        yield TokenChunk(0, tokens, logprobs, reason if place == last else None)


class AnswerWriter:
    """An answer as OpenAI's clients read it: whole, or as chunks of a stream."""

    def __init__(self, body: ChatBody | CompletionBody, answer: SpeculatedAnswer):
        self._answer = answer
        head = (uuid.uuid4().hex, int(time.time()), body.model)
        codec, prompt = answer.text.codec, answer.task.prompt
        self._chat = self._completion = None
        if isinstance(body, ChatBody):
            self._chat = ChatAnswers(*head, chat_form(body), codec, prompt)
        else:
            self._completion = CompletionAnswers(*head, completion_form(body), codec)
        self._is_open = False

    def whole(self) -> Json:
        answer, usage = self._answer.answer, self._answer.usage
        if self._chat is not None:
            return self._chat.whole([answer], usage)
        assert self._completion is not None
        tokens = [scored.token for scored in answer.tokens]
        prompt = self._answer.task.prompt
        choice = CompletionChoice(0, prompt, answer.text, (), tokens, answer.finish_reason)
        return self._completion.whole([choice], usage)

    def chunks(self, event: Event) -> Iterator[Json]:
        if self._chat is None:
            assert self._completion is not None
            yield from self._completion.event(event, 0)
            return
        if not self._is_open:
            self._is_open = True
            yield from self._chat.opening(1)
        yield from self._chat.event(event)

    def closing(self) -> Iterator[Json]:
        answers = self._chat or self._completion
        assert answers is not None
        return answers.closing(self._answer.usage)
