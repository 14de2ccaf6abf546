"""A trace of the engine's lanes on one GPU: whether prompts are read while others are decoded.

Sequences of a network of random weights are decoded, with drafts by a network of two layers, while
long prompts come. `benchmarks/gpu.py --trace FILE` writes what torch.profiler saw, for a browser's
chrome://tracing or Perfetto, and says how long the lanes computed at once.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from overlap import MARK, LaneKernels, busy, lane_kernels, overlap
from torch.profiler import ProfilerActivity, profile, record_function

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gpu_work import SHAPES, TINY, random_base, version  # noqa: E402

from tinkercloud.core.types import SampleRequest, SamplingParams  # noqa: E402
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter  # noqa: E402
from tinkercloud.embedded.forward.kv_blocks import BlockPool  # noqa: E402
from tinkercloud.embedded.forward.runners import Runner  # noqa: E402
from tinkercloud.embedded.model.base_model import BaseModel  # noqa: E402
from tinkercloud.embedded.sampling.cuda_streams import StreamRole, Streams, streams_for  # noqa: E402
from tinkercloud.embedded.sampling.engine import SamplingEngine  # noqa: E402
from tinkercloud.embedded.sampling.speculation import Speculation  # noqa: E402
from tinkercloud.speculative.draft_length.fixed_length import Steady  # noqa: E402
from tinkercloud.speculative.drafters.guarded_drafter import guarded  # noqa: E402

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
        return cls("Qwen3-0.6B", 16, 24, 2000, 2**33, 40, 30)


class MarkedLanes:
    """Other lanes, whose sections have names in a profiler's trace."""

    def __init__(self, lanes: Streams):
        self._lanes = lanes

    @property
    def are_parallel(self) -> bool:
        return self._lanes.are_parallel

    def fork_join(self) -> AbstractContextManager[None]:
        return self._lanes.fork_join()

    @contextmanager
    def on(self, lane: StreamRole, *after: StreamRole) -> Iterator[None]:
        with record_function(f"{MARK}{lane.value}"), self._lanes.on(lane, *after):
            yield


class Drafting:
    """An `engine.Speculate` by a network of two layers of the base's shape."""

    def __init__(self, base: BaseModel):
        config = replace(base.config, num_layers=2)
        self._base = random_base("draft", config, base.dtype, base.device)

    def __call__(self, base: BaseModel, runner: Runner, pool: BlockPool) -> Speculation:
        own, vocab_size = self._base, base.config.vocab_size
        blocks = BlockPool(own.config, own.dtype, own.device, DRAFT_BLOCKS)
        drafter = ModelDrafter(version(own, adapter=False), runner, blocks)
        return Speculation(guarded(drafter, vocab_size), Steady(MOST_DRAFTED))


def request(num_tokens: int, max_tokens: int, seed: int, vocab_size: int) -> SampleRequest:
    prompt = np.random.default_rng(seed).integers(0, vocab_size, num_tokens)
    return SampleRequest(prompt.astype(np.int32), 1, SamplingParams(max_tokens, seed=seed))


class Mixed:
    """An engine under the load."""

    def __init__(self, load: Load, base: BaseModel):
        self._load, self._base, self._own = load, base, version(base, adapter=False)
        self.engine = SamplingEngine(
            max_batch=256, kv_cache_bytes=load.kv_cache_bytes, depth=2.0, speculate=Drafting(base)
        )
        self.engine.use_streams(MarkedLanes(streams_for(base.device)))
        self._num_given = 0

    def submit(self, num_tokens: int, max_tokens: int) -> None:
        self._num_given += 1
        size = self._base.config.vocab_size
        given = request(num_tokens, max_tokens, self._num_given, size)
        self.engine.submit(self._own, given, _check)

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
    return list(told(lane_kernels(json.loads(path.read_text()))))


def told(found: LaneKernels) -> Iterator[str]:
    if not found.intervals:
        yield "the trace has no kernels of lanes: this device has one lane"
        return
    for lane, streams in sorted(found.streams.items()):
        ms = busy(found.intervals, lane) / 1e3
        yield f"{lane}: {ms:.2f} ms of kernels, on streams {_listed(streams)}"
    prefill = busy(found.intervals, StreamRole.PREFILL.value)
    for lane in (StreamRole.DRAFT, StreamRole.VERIFY):
        both = overlap(found.intervals, StreamRole.PREFILL.value, lane.value)
        share = both / prefill if prefill else 0.0
        yield f"prefill beside {lane.value}: {both / 1e3:.2f} ms, {share:.1%} of prefill's time"


def _listed(streams: set[int]) -> str:
    return ", ".join(map(str, sorted(streams)))
