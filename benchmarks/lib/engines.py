"""Sampling engines in this process: one that does everything, and two workers of which one computes
prompts and the other what follows them.

Both are our engine, so that their kernels, number type and noise are the same: a token's noise
belongs to its position, and two workers draw the tokens that one engine draws.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Thread
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from tinkercloud.core.types import (
    SampledSequence,
    SampleOutput,
    SampleRequest,
    SamplingParams,
)
from tinkercloud.embedded.forward.kv_blocks import BlockPool, Digest, block_digests
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.engine import SamplingEngine

logger = logging.getLogger(__name__)

Reply = Callable[[SampleOutput | BaseException], None]
Action = Callable[[SamplingEngine], object]


class EngineThread:
    """An engine that steps in a thread of its own while it has samples."""

    def __init__(self, engine: SamplingEngine):
        self._engine = engine
        self._inbox: SimpleQueue[Action | None] = SimpleQueue()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._inbox.put(None)
        self._thread.join()

    def between_steps(self, action: Action) -> None:
        """Called in the engine's thread."""
        self._inbox.put(action)

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            while not self._engine.busy or not self._inbox.empty():
                action = self._inbox.get()
                if action is None:
                    return
                action(self._engine)
            try:
                self._engine.step()
            except Exception as error:  # who waits gets it
                logger.exception("a step failed")
                self._engine.fail_all(error)


class Sampler(Protocol):
    def submit(self, request: SampleRequest, reply: Reply) -> None:
        """reply: is called in another thread."""
        ...


class OneEngine:
    def __init__(self, version: Version, thread: EngineThread):
        self._version, self._thread = version, thread

    def submit(self, request: SampleRequest, reply: Reply) -> None:
        self._thread.between_steps(lambda engine: engine.submit(self._version, request, reply))


@dataclass(frozen=True)
class KeysAndValues:
    """Of the full blocks of a prompt; tensors (blocks, ...), keys and values of each layer."""

    digests: Sequence[Digest]
    tensors: Sequence[Tensor]

    @classmethod
    def copied(cls, pool: BlockPool, version: Version, prompt: Sequence[int]) -> Self:
        """Fewer where blocks were taken for others since."""
        digests = block_digests(version.id, "", prompt)
        blocks = pool.find(digests)
        tensors = [tensor[blocks] for tensor in (*pool.keys, *pool.values)]
        pool.free(blocks)
        return cls(digests[: len(blocks)], tensors)

    def put(self, pool: BlockPool, version: Version) -> None:
        """Where the next request finds them; nowhere where there is no room."""
        blocks = pool.allocate(len(self.digests))
        if blocks is None:
            return
        for tensor, part in zip((*pool.keys, *pool.values), self.tensors, strict=True):
            tensor[blocks] = part
        for block, digest in zip(blocks, self.digests, strict=True):
            pool.register(block, version.id, digest)
        pool.free(blocks)


class TwoWorkers:
    """prompts: computes each prompt, and draws the first token. tokens: draws the others, with the
    keys and values that are handed over to it: those of full blocks; what is behind these it
    computes again. Requests say how many tokens they want."""

    def __init__(self, version: Version, prompts: EngineThread, tokens: EngineThread):
        self.version, self.prompts, self.tokens = version, prompts, tokens

    def submit(self, request: SampleRequest, reply: Reply) -> None:
        sample = _DividedSample(self, request, reply)
        self.prompts.between_steps(sample.begin)


class _DividedSample:
    """Its methods are called in this order, each in the thread of the worker that it is for."""

    def __init__(self, workers: TwoWorkers, request: SampleRequest, reply: Reply):
        assert request.params.max_tokens is not None
        self._workers, self._request, self._reply = workers, request, reply
        self._num_left = request.params.max_tokens - 1
        self._first: SampledSequence | None = None

    def begin(self, engine: SamplingEngine) -> None:
        params = replace(self._request.params, max_tokens=1)
        first = replace(self._request, params=params)
        engine.submit(self._workers.version, first, self._has_first)

    def _has_first(self, output: SampleOutput | BaseException) -> None:
        if isinstance(output, BaseException) or not self._num_left:
            self._reply(output)
            return
        [self._first] = output.sequences
        self._workers.prompts.between_steps(self._hand_over)

    def _hand_over(self, engine: SamplingEngine) -> None:
        version = self._workers.version
        pool = engine.states.cache_of(version.base).pool
        part = KeysAndValues.copied(pool, version, self._request.prompt.tolist())
        self._workers.tokens.between_steps(lambda engine: self._go_on(engine, part))

    def _go_on(self, engine: SamplingEngine, part: KeysAndValues) -> None:
        version, first = self._workers.version, self._first
        assert first is not None
        engine.states.open(version.base)
        part.put(engine.states.cache_of(version.base).pool, version)
        prompt = np.append(self._request.prompt, first.tokens)
        params = replace(self._request.params, max_tokens=self._num_left)
        rest = replace(self._request, prompt=prompt, params=params)
        engine.submit(version, rest, self._has_rest)

    def _has_rest(self, output: SampleOutput | BaseException) -> None:
        if isinstance(output, BaseException):
            self._reply(output)
            return
        first, [rest] = self._first, output.sequences
        assert first is not None
        tokens = np.append(first.tokens, rest.tokens)
        logprobs = np.append(first.logprobs, rest.logprobs)
        whole = replace(rest, tokens=tokens, logprobs=logprobs)
        self._reply(replace(output, sequences=(whole,)))


def one_engine(stack: ExitStack, version: Version, engine: SamplingEngine) -> OneEngine:
    return OneEngine(version, stack.enter_context(EngineThread(engine)))


def two_workers(
    stack: ExitStack, version: Version, make: Callable[[int], SamplingEngine]
) -> TwoWorkers:
    """make: takes the threads of an engine; each worker has one."""
    workers = [stack.enter_context(EngineThread(make(1))) for _ in range(2)]
    return TwoWorkers(version, *workers)


class InProcess:
    """A client of a sampler."""

    def __init__(self, sampler: Sampler):
        self._sampler = sampler

    async def sample(self, prompt: Sequence[int], max_tokens: int, seed: int) -> list[int]:
        """At temperature 1, whatever ends a text. Raises what the engine has raised."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[SampleOutput] = loop.create_future()

        def reply(output: SampleOutput | BaseException) -> None:
            loop.call_soon_threadsafe(take, output)

        def take(output: SampleOutput | BaseException) -> None:
            if answer.done():  # cancelled
                return
            if isinstance(output, BaseException):
                answer.set_exception(output)
            else:
                answer.set_result(output)

        params = SamplingParams(max_tokens, seed, 1.0, use_eos=False)
        request = SampleRequest(np.array(prompt, np.int32), 1, params)
        self._sampler.submit(request, reply)
        return (await answer).sequences[0].tokens.tolist()
