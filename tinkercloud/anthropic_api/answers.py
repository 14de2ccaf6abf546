"""Answers of /v1/messages: one object, or the events of a stream."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tinkercloud.anthropic_api.messages import INVALID_JSON
from tinkercloud.chat.answer import Answer
from tinkercloud.chat.requests import Usage
from tinkercloud.chat.sample_parser import CallDelta, Event, SampleEnd, TextDelta

Json = dict[str, Any]


def message_json(run_id: str, model: str, answer: Answer, usage: Usage) -> Json:
    content: list[Json] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text or not answer.calls:
        content.append({"type": "text", "text": answer.text})
    for call in answer.calls:
        value = _input(call.arguments)
        content.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": value})
    return _message(run_id, model, usage_json(usage)) | {
        "content": content,
        "stop_reason": stop_reason(answer.finish_reason, answer.stop),
        "stop_sequence": answer.stop,
    }


def _message(run_id: str, model: str, usage: Json) -> Json:
    return {
        "id": f"msg_{run_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _input(arguments: str) -> Json:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}


def stop_reason(finish_reason: str, stop: str | None) -> str:
    if stop is not None and finish_reason == "stop":
        return "stop_sequence"
    return {"length": "max_tokens", "tool_calls": "tool_use"}.get(finish_reason, "end_turn")


def usage_json(usage: Usage) -> Json:
    """Anthropic counts tokens that were cached apart from the others."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.sampled_tokens,
    }


@dataclass(slots=True)
class MessageStream:
    """The events of one message, each as (name, body). Blocks follow each other: a delta of another
    kind ends the block before it."""

    run_id: str
    model: str
    _index: int = field(default=-1, init=False)
    _open: str | None = field(default=None, init=False)  # the kind of the block underway
    _end: SampleEnd | None = field(default=None, init=False)

    def opening(self, prompt_tokens: int) -> Iterator[tuple[str, Json]]:
        """What was cached is not known yet: the last event has the final counts."""
        message = _message(self.run_id, self.model, usage_json(Usage(prompt_tokens, 0)))
        yield "message_start", {"type": "message_start", "message": message}
        yield "ping", {"type": "ping"}

    def event(self, event: Event) -> Iterator[tuple[str, Json]]:
        match event:
            case TextDelta():
                if event.reasoning:
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                    yield from self._require("thinking", block)
                    yield self._delta({"type": "thinking_delta", "thinking": event.reasoning})
                if event.text:
                    yield from self._require("text", {"type": "text", "text": ""})
                    yield self._delta({"type": "text_delta", "text": event.text})
            case CallDelta():
                yield from self._call(event)
            case SampleEnd():
                self._end = event

    def closing(self, usage: Usage) -> Iterator[tuple[str, Json]]:
        assert self._end is not None
        if self._index < 0:  # an answer without a token of text
            yield from self._require("text", {"type": "text", "text": ""})
        yield from self._close()
        reason = stop_reason(self._end.finish_reason, self._end.stop)
        delta = {"stop_reason": reason, "stop_sequence": self._end.stop}
        body = {"type": "message_delta", "delta": delta, "usage": usage_json(usage)}
        yield "message_delta", body
        yield "message_stop", {"type": "message_stop"}

    def _call(self, event: CallDelta) -> Iterator[tuple[str, Json]]:
        if event.name is not None:
            yield from self._close()
            block = {"type": "tool_use", "id": event.call_id, "name": event.name, "input": {}}
            yield from self._require("tool_use", block)
        if event.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": event.arguments})

    def _require(self, kind: str, block: Json) -> Iterator[tuple[str, Json]]:
        """Begin a block of this kind unless one is underway."""
        if self._open == kind:
            return
        yield from self._close()
        self._index += 1
        self._open = kind
        body = {"type": "content_block_start", "index": self._index, "content_block": block}
        yield "content_block_start", body

    def _delta(self, delta: Json) -> tuple[str, Json]:
        body = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return "content_block_delta", body

    def _close(self) -> Iterator[tuple[str, Json]]:
        if self._open is not None:
            self._open = None
            yield "content_block_stop", {"type": "content_block_stop", "index": self._index}
