"""The engine of two workers, beside one engine: the same samples, and keys and values that are
handed over."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from benchmarks.lib.engines import InProcess, Sampler, one_engine, two_workers
from tests.embedded.tiny import open_store
from tinkercloud.core.types import SampleOutput, SampleRequest, SamplingParams
from tinkercloud.embedded.forward.kv_blocks import BLOCK_TOKENS
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.native import compiler
from tinkercloud.embedded.sampling.engine import SamplingEngine

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="there is no C compiler")

LENGTHS = (1, BLOCK_TOKENS - 1, BLOCK_TOKENS, 2 * BLOCK_TOKENS + 3, 4 * BLOCK_TOKENS)


@pytest.fixture
def version(folder: Path) -> Version:
    base = open_store(folder).base("tiny")
    return Version("tiny", base, base.weights, None, 1.0)


def engine(threads: int) -> SamplingEngine:
    return SamplingEngine(max_batch=3, kv_cache_bytes=2**24, num_threads=threads)


def prompts(version: Version) -> list[list[int]]:
    generator = np.random.default_rng(0)
    size = version.base.config.vocab_size
    return [generator.integers(0, size, length).tolist() for length in LENGTHS]


async def sampled(sampler: Sampler, texts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """All at once."""
    client = InProcess(sampler)
    answers = (client.sample(text, tokens, seed) for seed, text in enumerate(texts))
    return await asyncio.gather(*answers)


@pytest.mark.parametrize("tokens", [1, 2, 20])
def test_two_workers_draw_what_one_engine_draws(version: Version, tokens: int):
    with ExitStack() as stack:
        one = one_engine(stack, version, engine(1))
        expected = asyncio.run(sampled(one, prompts(version), tokens))
        found = asyncio.run(sampled(two_workers(stack, version, engine), prompts(version), tokens))
    assert found == expected
    assert {len(sample) for sample in found} == {tokens}


def test_a_prompts_full_blocks_are_handed_over(version: Version):
    outputs: SimpleQueue[SampleOutput | BaseException] = SimpleQueue()
    prompt = np.array(prompts(version)[3], np.int32)
    request = SampleRequest(prompt, 1, SamplingParams(8, 0, use_eos=False))
    with ExitStack() as stack:
        two_workers(stack, version, engine).submit(request, outputs.put)
        output = outputs.get(timeout=20)
    assert isinstance(output, SampleOutput)
    assert output.prompt_cache_hit_tokens == 2 * BLOCK_TOKENS
    [sequence] = output.sequences
    assert len(sequence.tokens) == len(sequence.logprobs) == 8
