"""Answers of /completions: one object, or the chunks of a stream."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tinkercloud.chat.answer import Answer
from tinkercloud.chat.requests import CompletionRequest, Usage
from tinkercloud.chat.sample_parser import Event, SampleEnd, ScoredToken, TextDelta
from tinkercloud.chat.text_model import TextCodec
from tinkercloud.core.types import SampleOutput
from tinkercloud.openai_api.chat_answers import LOWEST_LOGPROB, usage_json
from tinkercloud.openai_api.requests import AnswerForm

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EchoedToken:
    """A token of the prompt. logprob None: the first one, which nothing predicts."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionChoice:
    """prompt: of this choice. text: with the prompt's where it is echoed. tokens: what was sampled,
    after the prompt's where that is echoed."""

    index: int
    prompt: Sequence[int]
    text: str
    tokens: Sequence[ScoredToken | EchoedToken]
    sampled: Sequence[int]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class CompletionAnswers:
    run_id: str
    created: int  # unix time, seconds
    model: str
    form: AnswerForm
    codec: TextCodec

    def text_of(self, prompt: Sequence[int]) -> str:
        return b"".join(map(self.codec.bytes_of, prompt)).decode(errors="replace")

    def whole(self, choices: Sequence[CompletionChoice], usage: Usage) -> Json:
        return self._head([self._choice(choice) for choice in choices]) | {
            "usage": usage_json(usage)
        }

    def _choice(self, choice: CompletionChoice) -> Json:
        body = _choice_json(choice.index, choice.text, choice.finish_reason)
        if self.form.logprobs:
            body["logprobs"] = self._logprobs(choice.tokens, 0)
        if self.form.token_ids:
            body |= {"prompt_token_ids": [*choice.prompt], "token_ids": [*choice.sampled]}
        return body

    # chunks

    def echo(self, index: int, text: str) -> Json:
        """The prompt's text, ahead of what is sampled."""
        return self._head([_choice_json(index, text)])

    def event(self, event: Event, offset: int) -> Iterator[Json]:
        """offset: how many characters of this choice's text came before."""
        if isinstance(event, SampleEnd):
            yield self._head([_choice_json(event.index, "", event.finish_reason)])
        elif isinstance(event, TextDelta):
            scores = event.tokens if self.form.logprobs or self.form.token_ids else ()
            if not event.text and not scores:
                return
            choice = _choice_json(event.index, event.text)
            if self.form.logprobs and scores:
                choice["logprobs"] = self._logprobs(scores, offset)
            if self.form.token_ids:
                choice["token_ids"] = [token.token for token in scores]
            yield self._head([choice])

    def closing(self, usage: Usage) -> Iterator[Json]:
        if self.form.usage:
            yield self._head([]) | {"usage": usage_json(usage)}

    def _head(self, choices: list[Json]) -> Json:
        return {
            "id": f"cmpl-{self.run_id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _logprobs(self, tokens: Sequence[ScoredToken | EchoedToken], offset: int) -> Json:
        names = [self.codec.name_of(token.token) for token in tokens]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += len(self.codec.bytes_of(token.token).decode(errors="ignore"))
        return {
            "tokens": names,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: ScoredToken | EchoedToken) -> Json | None:
        if token.logprob is None or not self.form.top_logprobs:
            return None
        return {
            self.codec.name_of(other): _finite(logprob)
            for other, logprob in token.top[: self.form.top_logprobs]
        }


def completion_choices(
    request: CompletionRequest,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Answer],
    outputs: Sequence[SampleOutput],
    text_of: Callable[[Sequence[int]], str],
) -> list[CompletionChoice]:
    """answers: n for each prompt, in order. With max_tokens 0 nothing was to be sampled."""
    choices: list[CompletionChoice] = []
    for answer in answers:
        place = answer.index // request.sampling.num_samples
        prompt, text, finish_reason = prompts[place], answer.text, answer.finish_reason
        tokens: list[ScoredToken | EchoedToken] = [*answer.tokens]
        if request.sampling.max_tokens == 0:
            text, tokens, finish_reason = "", [], "length"
        sampled = [token.token for token in tokens]
        if request.echo:
            text = text_of(prompt) + text
            tokens = [*_echoed(prompt, outputs[place]), *tokens]
        choices.append(CompletionChoice(answer.index, prompt, text, tokens, sampled, finish_reason))
    return choices


def _echoed(prompt: Sequence[int], output: SampleOutput) -> Iterator[EchoedToken]:
    logprobs, topk = output.prompt_logprobs, output.topk_prompt_logprobs
    for place, token in enumerate(prompt):
        logprob = None if logprobs is None or place == 0 else float(logprobs[place])
        top: tuple[tuple[int, float], ...] = ()
        if topk is not None and place > 0:
            ids, values = topk.token_ids[place].tolist(), topk.logprobs[place].tolist()
            top = tuple(zip(ids, values, strict=True))
        yield EchoedToken(token, logprob, top)


def _choice_json(index: int, text: str, finish_reason: str | None = None) -> Json:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)
