"""What the proxy serves: one model, and which way each of its requests goes."""

import asyncio
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tinkercloud.chat.requests import SamplingOptions
from tinkercloud.chat.sample_parser import ParserOptions
from tinkercloud.chat.text_model import TextModel
from tinkercloud.errors import (
    ContextLengthExceeded,
    InvalidField,
    TinkercloudError,
    TooManyRequests,
    UnknownModelName,
    UserError,
)
from tinkercloud.openai_api.bodies import ChatBody, CompletionBody
from tinkercloud.openai_api.requests import chat_request, completion_request
from tinkercloud.proxy.answering import SpeculatedAnswer
from tinkercloud.proxy.discovery import Listed
from tinkercloud.proxy.eligibility import ServerDefaults, why_passed_on
from tinkercloud.proxy.speculation import SampleTask, Speculator
from tinkercloud.proxy.upstream import Upstream

PROMPT_END = 16  # tokens, enough for what a template opens an answer with


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """max_requests: underway at a time. max_body_bytes: of a request. max_prompt_tokens: of those
    that are speculated for; max_output_tokens: that a request may ask for."""

    max_requests: int = 256
    max_body_bytes: int = 8 * 1024 * 1024
    max_prompt_tokens: int = 131_072
    max_output_tokens: int = 32_768


@dataclass(frozen=True, slots=True)
class Speculation:
    """text: the target's tokenizer and template."""

    speculator: Speculator
    text: TextModel
    defaults: ServerDefaults


@dataclass(slots=True)
class RequestCounts:
    """Since the start. passed_on: by the field that speculation does not serve. failed: that ended
    with an error of the target, or with its refusal. passed_tokens: of answers that the target gave
    itself."""

    speculated: int = 0
    passed_on: Counter[str] = field(default_factory=Counter[str])
    running: int = 0
    failed: int = 0
    passed_tokens: int = 0


class ProxyService:
    """speculation None: every request is passed on, for the reason `passes_on`."""

    def __init__(
        self,
        upstream: Upstream,
        target: Listed,
        speculation: Speculation | None,
        passes_on: str,
        limits: ProxyLimits,
    ):
        self.upstream = upstream
        self.target = target
        self.speculation = speculation
        self.passes_on = passes_on
        self.limits = limits
        self.counts = RequestCounts()
        self._began = time.monotonic()

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._began

    def check(self, body: ChatBody | CompletionBody) -> None:
        """Raises UserError for what is served by no way."""
        if body.model != self.target.model:
            reason = f"this proxy serves {self.target.model}"
            raise UnknownModelName(body.model, reason)
        if self.counts.running >= self.limits.max_requests:
            raise TooManyRequests(f"{self.limits.max_requests} requests are underway here")
        most = self.limits.max_output_tokens
        if (_asked_tokens(body) or 0) > most:
            raise InvalidField("max_tokens", f"max_tokens may be {most} at most here")

    async def begin(self, body: ChatBody | CompletionBody) -> SpeculatedAnswer | None:
        """None: the target is to answer it. Raises UserError."""
        if self.speculation is None:
            self.counts.passed_on["all"] += 1
            return None
        try:
            answer = await self._speculated(self.speculation, body)
        except _PassOn as reason:
            self.counts.passed_on[str(reason)] += 1
            return None
        self.counts.speculated += 1
        return answer

    async def _speculated(
        self, speculation: Speculation, body: ChatBody | CompletionBody
    ) -> SpeculatedAnswer:
        if field_name := why_passed_on(body):
            raise _PassOn(field_name)
        try:
            prompt, sampling = await self._prompt(speculation, body)
        except UserError:  # the target says what it does not take, in its own words
            raise _PassOn("prompt") from None
        if len(prompt) > self.limits.max_prompt_tokens:
            most = self.limits.max_prompt_tokens
            raise ContextLengthExceeded(f"the prompt has {len(prompt)} tokens of {most} at most")
        if not speculation.speculator.target.takes(sampling):
            raise _PassOn("temperature")
        task = SampleTask(prompt, self._max_tokens(body, len(prompt)), sampling)
        is_ours = speculation.speculator.target.kind.is_seeded
        end = b"".join(map(speculation.text.codec.bytes_of, prompt[-PROMPT_END:]))
        options = ParserOptions(
            stops=sampling.stops,
            end_tokens=speculation.defaults.end_tokens,
            prompt_end=end.decode(errors="replace"),
            reasoning=is_ours and isinstance(body, ChatBody),
        )
        return SpeculatedAnswer(speculation.speculator, speculation.text, task, options)

    async def _prompt(
        self, speculation: Speculation, body: ChatBody | CompletionBody
    ) -> tuple[tuple[int, ...], SamplingOptions]:
        text, defaults = speculation.text, speculation.defaults
        if isinstance(body, ChatBody):
            request = chat_request(body)
            tokens = await asyncio.to_thread(text.prompt, request.conversation)
        else:
            request = completion_request(body)
            prompt = request.prompts[0]
            is_text = isinstance(prompt, str)
            tokens = (
                await asyncio.to_thread(text.codec.encode, prompt, bos=True) if is_text else prompt
            )
        if not tokens:
            raise InvalidField("prompt", "the prompt is empty")
        return tuple(tokens), defaults.sampling(body, request.sampling.stops)

    def _max_tokens(self, body: ChatBody | CompletionBody, num_prompt: int) -> int:
        room = (self.target.max_context or num_prompt + self.limits.max_output_tokens) - num_prompt
        max_tokens = _asked_tokens(body)
        if max_tokens is None and isinstance(body, CompletionBody):
            max_tokens = completion_request(body).sampling.max_tokens
        if room < 1 or (max_tokens is not None and not 1 <= max_tokens <= room):
            raise _PassOn("max_tokens")
        return min(room, self.limits.max_output_tokens) if max_tokens is None else max_tokens

    @contextmanager
    def running(self) -> Generator[None]:
        self.counts.running += 1
        try:
            yield
        except TinkercloudError:
            self.counts.failed += 1
            raise
        finally:
            self.counts.running -= 1


class _PassOn(Exception):
    """Its text: the field for which the target answers the request itself."""


def _asked_tokens(body: ChatBody | CompletionBody) -> int | None:
    more = body.max_completion_tokens if isinstance(body, ChatBody) else None
    return body.max_tokens if more is None else more
