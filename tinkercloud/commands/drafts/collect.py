"""Sampling with a model of the settings: texts that drafts learn from, and how a draft does in the
engine. Drafts change nothing of what is sampled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinkercloud.commands.bench import (
    AcceptanceSummary,
    EngineFactory,
    TimedRun,
    Workload,
    run_timed,
)
from tinkercloud.commands.drafts.target import Target
from tinkercloud.core.types import SampleRequest, SamplingParams
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.engine import Speculate
from tinkercloud.embedded.sampling.speculation import Speculation
from tinkercloud.speculative.draft_length.fixed_length import FixedLength
from tinkercloud.speculative.drafters.drafter import Drafter, Stream
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter
from tinkercloud.speculative.learning.cases import CaseStore
from tinkercloud.speculative.learning.collecting import (
    CaseCollector,
    CollectorSettings,
    JudgedToken,
)

KV_CACHE_BYTES = 2**30
DRAFTED_AT_ONCE = 16  # samples

MakeDrafter = Callable[[Runner], Drafter]
"""Of the engine's runner, which computes the target."""


class Text(NamedTuple):
    """tokens: of the prompt and the sample. temperature: that the model wrote it at."""

    num_prompt: int
    tokens: NDArray[np.int32]
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class CollectConfig:
    """samples: of each prompt, `tokens` of each. Another seed draws other samples. draft_tokens:
    drafted at once."""

    samples: int = 4
    tokens: int = 64
    temperature: float = 1.0
    seed: int = 1_000_000
    draft_tokens: int = 4


@dataclass(frozen=True, slots=True)
class Collected:
    """How a draft did: tokens per second with it drafting for every sample."""

    acceptance: AcceptanceSummary
    tokens_per_s: float


class CaseRecorder:
    """An observer of drafts that keeps every disagreement, and some agreed cases."""

    version_lag = 0
    reads_distributions = True

    def __init__(self, store: CaseStore):
        rates = CollectorSettings(per_second=1e9, burst=1e9, agreed_one_in=4)
        self._collector = CaseCollector(store, rates)

    def drafted(self, category: str, num_judged: int, num_accepted: int) -> None:
        """The engine's telemetry counts them too."""

    def judged(self, stream: Stream, token: JudgedToken, category: str) -> None:
        self._collector.judged(stream, token, category)

    def ended(self, stream: Stream, version: Version) -> None:
        self._collector.ended(stream)

    def forget(self, version_id: str) -> None:
        """Cases hold no weights."""


def sample_texts(target: Target, config: CollectConfig) -> list[Text]:
    """Without drafts."""
    outputs = _sampled(target, config, max_batch=64).outputs
    return [
        Text(
            len(prompt),
            np.concatenate([prompt, sequence.tokens]).astype(np.int32),
            config.temperature,
        )
        for prompt, output in zip(target.prompts, outputs, strict=True)
        for sequence in output.sequences
    ]


def plain_tokens_per_s(target: Target, config: CollectConfig) -> float:
    """Without drafts, as many samples at once as `collected` decodes."""
    return _tokens_per_s(_sampled(target, config, DRAFTED_AT_ONCE))


def collected(
    target: Target, make_drafter: MakeDrafter, config: CollectConfig, store: CaseStore
) -> Collected:
    """Samples with the drafter drafting for every sample; its cases go to the store."""
    speculations: list[Speculation] = []

    def speculate(base: BaseModel, runner: Runner, pool: BlockPool) -> Speculation:
        guard = GuardedDrafter(make_drafter(runner), base.config.vocab_size)
        length = FixedLength(config.draft_tokens)
        speculations.append(Speculation(guard, length, None, CaseRecorder(store)))
        return speculations[-1]

    run = _sampled(target, config, DRAFTED_AT_ONCE, speculate)
    return Collected(AcceptanceSummary.of(speculations[0].snapshot()), _tokens_per_s(run))


def _tokens_per_s(run: TimedRun) -> float:
    return sum(len(s.tokens) for output in run.outputs for s in output.sequences) / run.seconds


def _sampled(
    target: Target, config: CollectConfig, max_batch: int, speculate: Speculate | None = None
) -> TimedRun:
    requests = [
        SampleRequest(
            np.array(prompt, np.int32),
            config.samples,
            SamplingParams(config.tokens, config.seed + i, config.temperature),
        )
        for i, prompt in enumerate(target.prompts)
    ]
    engines = EngineFactory(max_batch, KV_CACHE_BYTES, target.num_threads, speculate)
    workload = Workload("prompts", target.version, tuple(requests))
    return run_timed(engines.make(), workload)
