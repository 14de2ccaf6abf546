"""Samples as their clients see them: tokens as events, and events put together."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tinkercloud.chat.sample_parser import (
    CallDelta,
    Event,
    ParserOptions,
    SampleEnd,
    SampleParser,
    ScoredToken,
    TextDelta,
)
from tinkercloud.chat.text_model import TextModel
from tinkercloud.core.types import TokenChunk


@dataclass(slots=True, eq=False)
class ToolCall:
    """arguments: JSON text, as the model wrote it."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True, eq=False)
class Answer:
    """One sample as its client sees it. finish_reason: of `sample_parser`; "" until it has ended.
    stop: the stop string that ended it. tokens: everything sampled, with what is no text."""

    index: int
    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    tokens: list[ScoredToken] = field(default_factory=list[ScoredToken])
    finish_reason: str = ""
    stop: str | None = None

    def add(self, event: Event) -> None:
        match event:
            case TextDelta():
                self.text += event.text
                self.reasoning += event.reasoning
                self.tokens += event.tokens
            case CallDelta():
                if event.name is not None:
                    self.calls.append(ToolCall(event.call_id or "", event.name))
                self.calls[-1].arguments += event.arguments
            case SampleEnd():
                self.finish_reason, self.stop = event.finish_reason, event.stop

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message, as an OpenAI client repeats it in its next request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.text or None
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return message


class ParsedAnswers:
    """Several samples while they are drawn. answers: by index."""

    def __init__(self, num_samples: int, model: TextModel, options: ParserOptions):
        self.answers = [Answer(index) for index in range(num_samples)]
        self._parsers = [SampleParser(index, model, options) for index in range(num_samples)]

    def feed(self, index: int, chunk: TokenChunk) -> Iterator[Event]:
        """What happens in this sample; its answer has it by then."""
        for event in self._parsers[index].feed(chunk):
            self.answers[index].add(event)
            yield event
