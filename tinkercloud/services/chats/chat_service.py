"""Chats: a conversation becomes a prompt, its samples become text and tool calls."""

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from tinker_gmi.types import EncodedTextChunk, ModelInput, SampleRequest, SamplingParams
from tinkercloud.chat.answer import Answer, ParsedAnswers
from tinkercloud.chat.call_schema import call_schema
from tinkercloud.chat.requests import ChatRequest, SamplingOptions, Usage, json_grammar
from tinkercloud.chat.sample_parser import Event, ParserOptions
from tinkercloud.chat.text_model import TextModel
from tinkercloud.chat.turn import Turn, TurnHooks
from tinkercloud.core.types import Grammar, SampledSequence, SampleOutput, ServedModel, Topk
from tinkercloud.core.types import SampleRequest as CoreSampleRequest
from tinkercloud.services.chats.model_names import ModelNames
from tinkercloud.services.chats.request_slots import RequestSlots
from tinkercloud.services.chats.sample_stream import SampleStream
from tinkercloud.services.chats.text_models import TextModels
from tinkercloud.services.models.sampling_service import DrawnSample, SamplingService
from tinkercloud.storage.metadata import Sampler

_PROMPT_END = 16  # tokens, enough for what a template opens an answer with


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A checked request: nothing that the client could have done wrong comes after it."""

    user: str
    request: ChatRequest
    sampler: Sampler
    sample: CoreSampleRequest
    text: TextModel
    options: ParserOptions


@dataclass(slots=True, eq=False)
class ChatRun:
    """One answer underway. `events` is read once; answers and usage are whole after it."""

    prepared: PreparedChat
    hooks: TurnHooks
    sampling: SamplingService
    slots: RequestSlots
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    answers: list[Answer] = field(default_factory=list[Answer])
    usage: Usage = field(default_factory=lambda: Usage(0, 0))

    @property
    def prompt_tokens(self) -> int:
        return len(self.prepared.sample.prompt)

    async def events(self) -> AsyncGenerator[Event, None]:
        """What happens in the samples, in the order it does. The turn's listener has been called
        when this ends. Closing it ends the samples."""
        prepared = self.prepared
        parsed = ParsedAnswers(prepared.sample.num_samples, prepared.text, prepared.options)
        self.answers = parsed.answers
        stream = SampleStream(
            lambda on_tokens: self.sampling.draw(prepared.sampler, prepared.sample, on_tokens)
        )
        with self.slots.held(prepared.user):
            async with aclosing(stream.chunks()) as chunks:
                async for chunk in chunks:
                    for event in parsed.feed(chunk.sample_index, chunk):
                        yield event
        assert stream.drawn is not None
        await self._finish(stream.drawn)

    async def _finish(self, drawn: DrawnSample) -> None:
        cached = drawn.output.prompt_cache_hit_tokens
        num_sampled = sum(len(answer.tokens) for answer in self.answers)
        self.usage = Usage(self.prompt_tokens, num_sampled, cached)
        if self.hooks.listener is not None:
            await self.hooks.listener.finished(self._turn(drawn))

    def _turn(self, drawn: DrawnSample) -> Turn:
        prepared, sampler = self.prepared, self.prepared.sampler
        return Turn(
            turn_id=self.run_id,
            user=prepared.user,
            model=prepared.request.model,
            base_model=sampler.base_model,
            model_path=sampler.model_path,
            sampler_id=sampler.sampler_id if sampler.session_id else None,
            version=drawn.version,
            conversation=prepared.request.conversation,
            request=prepared.sample,
            output=_shown(drawn.output, self.answers),
            answers=tuple(self.answers),
        )


def _shown(output: SampleOutput, answers: Sequence[Answer]) -> SampleOutput:
    """Up to where each answer ended: a backend may draw beyond a stop string."""
    sequences = [
        s if len(answer.tokens) == len(s.tokens) else _cut(s, len(answer.tokens))
        for s, answer in zip(output.sequences, answers, strict=True)
    ]
    return replace(output, sequences=tuple(sequences))


def _cut(sequence: SampledSequence, length: int) -> SampledSequence:
    topk = sequence.topk
    if topk is not None:
        topk = Topk(topk.token_ids[:length], topk.logprobs[:length])
    return SampledSequence(sequence.tokens[:length], sequence.logprobs[:length], "stop", topk)


class ChatService:
    def __init__(
        self,
        names: ModelNames,
        texts: TextModels,
        sampling: SamplingService,
        slots: RequestSlots,
    ):
        self._names = names
        self._texts = texts
        self._sampling = sampling
        self._slots = slots

    async def begin(
        self, user: str, request: ChatRequest, hooks: TurnHooks | None = None
    ) -> ChatRun:
        """A chat that is checked whole and samples when its events are read.

        hooks: who gives the prompt's tokens, and who gets the finished turn; by default the
        chat template and nobody. Raises UnknownModelName, InvalidRequest, TooManyRequests."""
        self._slots.check(user)
        hooks = hooks or TurnHooks()
        sampler, text, prompt = await self._prompt(user, request, hooks)
        if request.forced_tools:
            prompt += text.codec.encode(text.require_tools().opening, bos=False)
        sample = await self._sampling.checked(sampler, sample_body(prompt, request.sampling))
        needs_logprobs = request.sampling.logprobs or hooks.listener is not None
        grammar = _grammar(request, text)
        sample = replace(sample, grammar=grammar, needs_logprobs=needs_logprobs)
        options = parser_options(request, text, self._texts.served(sampler.base_model), prompt)
        prepared = PreparedChat(user, request, sampler, sample, text, options)
        return ChatRun(prepared, hooks, self._sampling, self._slots)

    async def num_prompt_tokens(
        self, user: str, request: ChatRequest, hooks: TurnHooks | None = None
    ) -> int:
        """How long the prompt of this request is."""
        _, _, prompt = await self._prompt(user, request, hooks or TurnHooks())
        return len(prompt)

    async def _prompt(
        self, user: str, request: ChatRequest, hooks: TurnHooks
    ) -> tuple[Sampler, TextModel, list[int]]:
        """What is sampled, how it is read as text, and the tokens of the conversation."""
        sampler = await self._names.resolve(user, hooks.model or request.model)
        text = await self._texts.get(sampler.base_model)
        return sampler, text, list(await hooks.source.prompt(request.conversation, text))


def sample_body(prompt: list[int], options: SamplingOptions) -> SampleRequest:
    """The request of the Tinker API with the same meaning: its checks and seeds are those here."""
    return SampleRequest(
        prompt=ModelInput(chunks=[EncodedTextChunk(tokens=prompt)]),
        num_samples=options.num_samples,
        sampling_params=sampling_params(options),
        topk_sample_logprobs=options.top_logprobs,
    )


def sampling_params(options: SamplingOptions) -> SamplingParams:
    return SamplingParams(
        max_tokens=options.max_tokens,
        seed=options.seed,
        stop=list(options.stops) or None,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
    )


def parser_options(
    request: ChatRequest, text: TextModel, served: ServedModel, prompt: list[int]
) -> ParserOptions:
    end = b"".join(text.codec.bytes_of(token) for token in prompt[-_PROMPT_END:])
    return ParserOptions(
        stops=request.sampling.stops,
        tool_names=tuple(map(_tool_name, request.conversation.tools)),
        one_call=request.one_call,
        end_tokens=frozenset(served.eos_token_ids),
        prompt_end=end.decode(errors="replace"),
        call_opening=text.require_tools().opening if request.forced_tools else "",
        reasoning=not request.forced_tools and request.grammar is None,
    )


def _grammar(request: ChatRequest, text: TextModel) -> Grammar | None:
    if not request.forced_tools:
        return request.grammar
    return json_grammar(call_schema(request.forced_tools, text.require_tools().arguments))


def _tool_name(tool: Mapping[str, Any]) -> str:
    return tool["function"]["name"]
