"""What tests of streams do, as functions of the device; tests/embedded runs them on a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tests.embedded.decode_scene import version
from tests.embedded.speculative_engine import Drafting
from tests.embedded.tiny import ask, random_prompt
from tinkercloud.core.types import SampleOutput, SampleRequest
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.sampling.base_states import Speculate
from tinkercloud.embedded.sampling.cuda_streams import Streams
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.speculative.drafters.suffix_drafter import SuffixDrafter

RANKS = (None, 4, 8)
STOPS = tuple("abcdefghijklmnopqrstuvwxyz")
APART = 3  # steps between two arrivals of two requests each


@dataclass(frozen=True)
class Load:
    requests: Sequence[SampleRequest]
    num_blocks: int = 2000
    most_drafted: int = 0


def mixed(temperature: float = 0.0) -> Load:
    """Prompts with one beginning, of one token and of more than a chunk, that come while others
    are decoded; stops, prompts that are scored, several samples of one prompt."""
    beginning, lengths = random_prompt(640, 0), (3, 40, 600, 610)
    prompts = [[*beginning[: lengths[i % 4]], i] for i in range(14)]
    prompts[8] = prompts[8][-1:]
    requests = [
        ask(
            prompts[i], n=1 + i % 3, max_tokens=12 + i, seed=i, temperature=temperature,
            use_eos=i % 5 == 0, stop_strings=STOPS if i % 4 == 1 else (), 
            prompt_logprobs=i in (4, 6), topk_prompt_logprobs=3 if i == 6 else 0,
        )
        for i in range(14)
    ]  # fmt: skip
    return Load(requests, most_drafted=4)


def crowded() -> Load:
    """Far more than the blocks hold, for over 50 steps."""
    requests = [
        ask(random_prompt(200 + 30 * i, i), n=2, max_tokens=70, seed=i, use_eos=False,
            temperature=0.0)
        for i in range(6)
    ]  # fmt: skip
    return Load(requests, num_blocks=66)


def suffix(vocab_size: int) -> object:
    return SuffixDrafter()


@dataclass(frozen=True)
class Answered:
    outputs: list[SampleOutput]
    num_steps: int
    num_preempted: int
    num_accepted: int


def answered(folder: Path, device: str, load: Load, streams: Streams | None) -> Answered:
    """The load's answers, in float32. streams None: the device's own."""
    base = BaseModel.load("tiny", folder, folder, torch.float32, torch.device(device))
    drafting = Drafting(suffix, load.most_drafted) if load.most_drafted else None
    engine = engine_of(base, load, streams, drafting)
    versions = [version(base, rank, i) for i, rank in enumerate(RANKS)]
    outputs: dict[int, SampleOutput | BaseException] = {}
    num_steps, waiting = 0, list(enumerate(load.requests))
    while waiting or engine.busy:
        for i, request in waiting[: 2 if num_steps % APART == 0 else 0]:
            engine.submit(versions[i % 3], request, lambda o, i=i: outputs.__setitem__(i, o))
            waiting = waiting[1:]
        engine.step()
        num_steps += 1
    found = [outputs[i] for i in range(len(load.requests))]
    num_accepted = drafting.policy.num_accepted if drafting else 0
    return Answered(found, num_steps, engine.num_preempted, num_accepted)


def engine_of(
    base: BaseModel, load: Load, streams: Streams | None, speculate: Speculate | None
) -> SamplingEngine:
    per_block = BlockPool.bytes_per_block(base.config, base.dtype)
    engine = SamplingEngine(
        max_batch=64, kv_cache_bytes=load.num_blocks * per_block, speculate=speculate
    )
    if streams is not None:
        engine.use_streams(streams)
    return engine


def compare(ours: Answered, theirs: Answered, tolerance: float) -> None:
    """tolerance: of log-probabilities; 0: to the bit."""
    for one, other in zip(ours.outputs, theirs.outputs, strict=True):
        for a, b in zip(one.sequences, other.sequences, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.stop_reason == b.stop_reason
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=tolerance, rtol=0)
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
        if one.prompt_logprobs is not None:
            pair = (one.prompt_logprobs[1:], other.prompt_logprobs[1:])
            np.testing.assert_allclose(*pair, atol=tolerance, rtol=0)
