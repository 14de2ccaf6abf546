"""Completions: texts or token ids go on, without messages."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from tinkercloud.chat.answer import Answer, ParsedAnswers
from tinkercloud.chat.requests import CompletionRequest, Usage
from tinkercloud.chat.sample_parser import Event, ParserOptions
from tinkercloud.chat.text_model import TextModel
from tinkercloud.core.types import SampleOutput, TokenChunk
from tinkercloud.core.types import SampleRequest as CoreSampleRequest
from tinkercloud.errors import InvalidField
from tinkercloud.services.chats.chat_service import sample_body
from tinkercloud.services.chats.model_names import ModelNames
from tinkercloud.services.chats.request_slots import RequestSlots
from tinkercloud.services.chats.sample_stream import Draw, SampleStream
from tinkercloud.services.chats.text_models import TextModels
from tinkercloud.services.models.sampling_service import SamplingService
from tinkercloud.storage.metadata import Sampler


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """samples: a checked request for each prompt."""

    user: str
    request: CompletionRequest
    sampler: Sampler
    samples: tuple[CoreSampleRequest, ...]
    text: TextModel
    options: ParserOptions


@dataclass(slots=True, eq=False)
class CompletionRun:
    """Answers underway: choice i * n + s is sample s of prompt i. `events` is read once; answers,
    outputs (one for each prompt) and usage are whole after it."""

    prepared: PreparedCompletion
    sampling: SamplingService
    slots: RequestSlots
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    answers: list[Answer] = field(default_factory=list[Answer])
    outputs: list[SampleOutput] = field(default_factory=list[SampleOutput])
    usage: Usage = field(default_factory=lambda: Usage(0, 0))

    async def events(self) -> AsyncGenerator[Event, None]:
        """What happens in all samples. Closing it ends them."""
        prepared, n = self.prepared, self.prepared.request.sampling.num_samples
        parsed = ParsedAnswers(n * len(prepared.samples), prepared.text, prepared.options)
        self.answers = parsed.answers
        streams = [SampleStream(self._draw(sample)) for sample in prepared.samples]
        with self.slots.held(prepared.user):
            async with aclosing(_merged([stream.chunks() for stream in streams])) as chunks:
                async for place, chunk in chunks:
                    for event in parsed.feed(place * n + chunk.sample_index, chunk):
                        yield event
        self.outputs = [stream.drawn.output for stream in streams if stream.drawn is not None]
        self.usage = self._counts()

    def _draw(self, sample: CoreSampleRequest) -> Draw:
        return lambda on_tokens: self.sampling.draw(self.prepared.sampler, sample, on_tokens)

    def _counts(self) -> Usage:
        num_sampled = sum(len(answer.tokens) for answer in self.answers)
        return Usage(
            sum(len(sample.prompt) for sample in self.prepared.samples),
            num_sampled if self.prepared.request.sampling.max_tokens != 0 else 0,
            sum(output.prompt_cache_hit_tokens for output in self.outputs),
        )


class TextCompletionService:
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
        self, user: str, request: CompletionRequest, *, prompt_logprobs: bool = False
    ) -> CompletionRun:
        """Completions that are checked whole and sample when their events are read.

        prompt_logprobs: outputs have those of the prompts. max_tokens 0 samples one token all the
        same, which whoever formats the answer leaves out. Raises as `ChatService.begin`."""
        self._slots.check(user)
        sampler = await self._names.resolve(user, request.model)
        text = await self._texts.get(sampler.base_model)
        prompts = [await prompt_tokens(text, prompt) for prompt in request.prompts]
        options = request.sampling
        if options.max_tokens == 0:
            options = replace(options, max_tokens=1)
        samples: list[CoreSampleRequest] = []
        for prompt in prompts:
            body = sample_body(prompt, options)
            if prompt_logprobs:
                body = body.model_copy(
                    update={
                        "prompt_logprobs": True,
                        "topk_prompt_logprobs": options.top_logprobs,
                    }
                )
            checked = await self._sampling.checked(sampler, body)
            samples.append(replace(checked, needs_logprobs=options.logprobs))
        end_tokens = frozenset(self._texts.served(sampler.base_model).eos_token_ids)
        parser = ParserOptions(stops=options.stops, end_tokens=end_tokens, reasoning=False)
        prepared = PreparedCompletion(user, request, sampler, tuple(samples), text, parser)
        return CompletionRun(prepared, self._sampling, self._slots)


async def prompt_tokens(text: TextModel, prompt: str | tuple[int, ...]) -> list[int]:
    """Raises InvalidField for an empty text, where the model has no token that begins texts."""
    if not isinstance(prompt, str):
        return list(prompt)
    if not prompt and not text.codec.encode("", bos=True):
        raise InvalidField("prompt", "prompt is empty; send a text or token ids")
    return await asyncio.to_thread(text.codec.encode, prompt, bos=True)


async def _merged(
    streams: Sequence[AsyncGenerator[TokenChunk, None]],
) -> AsyncGenerator[tuple[int, TokenChunk], None]:
    """The chunks of all streams as they come, each with its stream's place."""
    if len(streams) == 1:  # by far the most: without a queue and a task for each
        async with aclosing(streams[0]) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, TokenChunk | None]] = asyncio.Queue()

    async def read(place: int, stream: AsyncGenerator[TokenChunk, None]) -> None:
        try:
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    queue.put_nowait((place, chunk))
        finally:
            queue.put_nowait((place, None))

    readers = [asyncio.ensure_future(read(*pair)) for pair in enumerate(streams)]
    try:
        open_streams = len(readers)
        while open_streams:
            place, chunk = await queue.get()
            if chunk is not None:
                yield place, chunk
                continue
            open_streams -= 1
            await readers[place]  # raises what ended it
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
