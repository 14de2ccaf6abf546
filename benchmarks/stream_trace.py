"""A trace of the engine's CUDA streams on one GPU: whether prompts are read while others decode.

Sequences of a network of random weights are decoded, with drafts by a network of two layers, while
long prompts come. `python -m benchmarks.gpu --trace FILE` writes the trace of torch.profiler, for a
browser's chrome://tracing or Perfetto, and says how long the streams computed at once.
"""

import gc
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu_work import SHAPES, TINY, random_base, version
from benchmarks.overlap import MARK, RoleKernels, busy, overlap, role_kernels
from tinkercloud.core.types import SampleRequest, SamplingParams
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.sampling.cuda_streams import StreamRole, Streams, streams_for
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.embedded.sampling.speculation import Speculation
from tinkercloud.speculative.draft_length.fixed_length import FixedLength
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter

MOST_DRAFTED = 3
DRAFT_BLOCKS = 2048


@dataclass(frozen=True)
class Load:
    """num_warm rounds go by before the trace, so that kernels are compiled and graphs captured."""

    shape: str
    num_decoding: int
    num_prompts: int
    prompt_tokens: int
    kv_cache_bytes: int
    num_warm: int
    num_traced: int

    @classmethod
    def of(cls, device: torch.device) -> "Load":
        if device.type == "cpu":
            return cls("tiny", 3, 2, 100, 2**24, 4, 4)
        return cls("Qwen3-0.6B", 16, 24, 2000, 2**33, 40, 6)


class MarkedStreams:
    """Streams whose sections have the names of their roles in a profiler's trace."""

    def __init__(self, streams: Streams):
        self._streams = streams

    @property
    def are_parallel(self) -> bool:
        return self._streams.are_parallel

    def fork_join(self) -> AbstractContextManager[None]:
        return self._streams.fork_join()

    @contextmanager
    def on(self, role: StreamRole, *after: StreamRole) -> Iterator[None]:
        with record_function(f"{MARK}{role.value}"), self._streams.on(role, *after):
            yield


class Drafting:
    """An `engine.Speculate` by a network of two layers of the base's shape."""

    def __init__(self, base: BaseModel):
        config = replace(base.config, num_layers=2)
        self._base = random_base("draft", config, base.dtype, base.device)

    def __call__(self, base: BaseModel, runner: Runner, pool: BlockPool) -> Speculation:
        draft = self._base
        layout = runner.kv_layout(draft)
        blocks = BlockPool(draft.config, draft.dtype, draft.device, DRAFT_BLOCKS, layout)
        drafter = ModelDrafter(version(draft, adapter=False), runner, blocks)
        guarded_drafter = GuardedDrafter(drafter, base.config.vocab_size)
        return Speculation(guarded_drafter, FixedLength(MOST_DRAFTED))


def request(num_tokens: int, max_tokens: int, seed: int, vocab_size: int) -> SampleRequest:
    prompt = np.random.default_rng(seed).integers(0, vocab_size, num_tokens)
    return SampleRequest(prompt.astype(np.int32), 1, SamplingParams(max_tokens, seed=seed))


class Mixed:
    """An engine under the load."""

    def __init__(self, load: Load, base: BaseModel):
        self._load, self._base, self._version = load, base, version(base, adapter=False)
        self.engine = SamplingEngine(
            max_batch=256, kv_cache_bytes=load.kv_cache_bytes, depth=2.0, speculate=Drafting(base)
        )
        self.engine.use_streams(MarkedStreams(streams_for(base.device)))
        self._num_requests = 0

    def submit(self, num_tokens: int, max_tokens: int) -> None:
        self._num_requests += 1
        size = self._base.config.vocab_size
        next_request = request(num_tokens, max_tokens, self._num_requests, size)
        self.engine.submit(self._version, next_request, _check)

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def run(self, path: Path) -> None:
        """The trace of the rounds that count, to `path`."""
        load = self._load
        for _ in range(load.num_decoding):
            self.submit(32, 600)
        for _ in range(2):
            self.submit(load.prompt_tokens, 4)
        self.rounds(load.num_warm)
        for _ in range(load.num_prompts):
            self.submit(load.prompt_tokens, 4)
        activities = [ProfilerActivity.CPU]
        if self._base.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            self.rounds(load.num_traced)
        profiler.export_chrome_trace(str(path))


def _check(output: object) -> None:
    if isinstance(output, BaseException):
        raise output


def traced(device: torch.device, dtype: torch.dtype, path: Path) -> list[str]:
    """Writes the trace; what it shows, in lines."""
    load = Load.of(device)
    base = random_base(load.shape, {**SHAPES, **TINY}[load.shape], dtype, device)
    Mixed(load, base).run(path)
    return list(summary(role_kernels(read(path))))


def read(path: Path) -> dict[str, Any]:
    """A trace. Of its hundred megabytes nothing is garbage, which a collector would look for again
    and again, for minutes."""
    gc.disable()
    try:
        return json.loads(path.read_text())
    finally:
        gc.enable()


def summary(kernels: RoleKernels) -> Iterator[str]:
    if not kernels.intervals:
        yield "the trace has no kernels: this device has one stream"
        return
    for role, streams in sorted(kernels.streams.items()):
        ms = busy(kernels.intervals, role) / 1e3
        yield f"{role}: {ms:.2f} ms of kernels, on streams {_listed(streams)}"
    prefill = busy(kernels.intervals, StreamRole.PREFILL.value)
    for role in (StreamRole.DRAFT, StreamRole.VERIFY):
        both = overlap(kernels.intervals, StreamRole.PREFILL.value, role.value)
        share = both / prefill if prefill else 0.0
        together = f"{both / 1e3:.2f} ms, {share:.1%} of prefill's time"
        yield f"prefill together with {role.value}: {together}"


def _listed(streams: set[int]) -> str:
    return ", ".join(map(str, sorted(streams)))
