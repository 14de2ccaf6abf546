"""Answers of /chat/completions: one object, or the chunks of a stream."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tinkercloud.chat.answer import Answer
from tinkercloud.chat.requests import Usage
from tinkercloud.chat.sample_parser import CallDelta, Event, SampleEnd, ScoredToken, TextDelta
from tinkercloud.chat.text_model import TextCodec
from tinkercloud.openai_api.requests import AnswerForm

Json = dict[str, Any]
LOWEST_LOGPROB = -9999.0  # as OpenAI has it: JSON has no infinity


@dataclass(frozen=True, slots=True)
class ChatAnswers:
    run_id: str
    created: int  # unix time, seconds
    model: str
    form: AnswerForm
    codec: TextCodec
    prompt: Sequence[int]

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Json:
        """chat.completion"""
        choices = [self._choice(answer) for answer in answers]
        body = self._head("chat.completion", choices) | {"usage": usage_json(usage)}
        if self.form.token_ids:
            body["prompt_token_ids"] = list(self.prompt)
        return body

    def _choice(self, answer: Answer) -> Json:
        choice: Json = {
            "index": answer.index,
            "message": answer.message | {"refusal": None},
            "logprobs": self._logprobs(answer.tokens) if self.form.logprobs else None,
            "finish_reason": answer.finish_reason,
        }
        if self.form.token_ids:
            choice["token_ids"] = [token.token for token in answer.tokens]
        return choice

    # chat.completion.chunk

    def opening(self, num_choices: int) -> Iterator[Json]:
        for index in range(num_choices):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def event(self, event: Event) -> Iterator[Json]:
        match event:
            case TextDelta():
                yield from self._text(event)
            case CallDelta():
                yield self._chunk(event.index, {"tool_calls": [_call_delta(event)]})
            case SampleEnd():
                yield self._chunk(event.index, {}, finish_reason=event.finish_reason)

    def closing(self, usage: Usage) -> Iterator[Json]:
        if self.form.usage:
            yield self._head("chat.completion.chunk", []) | {"usage": usage_json(usage)}

    def _text(self, event: TextDelta) -> Iterator[Json]:
        delta = {"content": event.text} if event.text else {}
        if event.reasoning:
            delta["reasoning_content"] = event.reasoning
        scores = event.tokens if self.form.logprobs or self.form.token_ids else ()
        if not delta and not scores:
            return
        chunk = self._chunk(event.index, delta)
        if self.form.logprobs and event.tokens:
            chunk["choices"][0]["logprobs"] = self._logprobs(event.tokens)
        if self.form.token_ids:
            chunk["choices"][0]["token_ids"] = [token.token for token in event.tokens]
        yield chunk

    def _chunk(self, index: int, delta: Json, finish_reason: str | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._head("chat.completion.chunk", [choice])

    def _head(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": f"chatcmpl-{self.run_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> Json:
        """With every sampled token, also those of tool calls and the one that ended the sample."""
        return {"content": [self._scored(token) for token in tokens], "refusal": None}

    def _scored(self, token: ScoredToken) -> Json:
        top = [self._token(*pair) for pair in token.top[: self.form.top_logprobs]]
        return self._token(token.token, token.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float) -> Json:
        return {
            "token": self.codec.name_of(token),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(self.codec.bytes_of(token)),
        }


def _call_delta(event: CallDelta) -> Json:
    delta: Json = {"index": event.call, "function": {"arguments": event.arguments}}
    if event.name is not None:
        delta |= {"id": event.call_id, "type": "function"}
        delta["function"]["name"] = event.name
    return delta


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.sampled_tokens,
        "total_tokens": usage.prompt_tokens + usage.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
