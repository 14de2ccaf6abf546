"""Sampling with a model of the settings: texts that drafts learn from, and how a head does in the
engine. Drafts change nothing of what is sampled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.commands.bench import AcceptanceSummary, EngineFactory, Workload, run_timed
from tinkercloud.core.types import SampleOutput, SampleRequest, SamplingParams
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.engine import Speculate
from tinkercloud.embedded.sampling.speculation import Speculation
from tinkercloud.speculative.draft_length.fixed_length import FixedLength
from tinkercloud.speculative.drafters.drafter import Stream
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter
from tinkercloud.speculative.head.head import Head
from tinkercloud.speculative.learning.cases import CaseStore
from tinkercloud.speculative.learning.collecting import (
    CaseCollector,
    CollectorSettings,
    JudgedToken,
)

DRAFT_LENGTH = 4
KV_CACHE_BYTES = 2**30

HeadParams = tuple[Head, dict[str, Tensor]]
"""A head and its parameters."""


class Text(NamedTuple):
    """tokens: of the prompt and the sample. temperature: that the model wrote it at."""

    num_prompt: int
    tokens: NDArray[np.int32]
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class CollectConfig:
    """samples: of each prompt, `tokens` of each. Another seed draws other samples."""

    samples: int = 4
    tokens: int = 64
    temperature: float = 1.0
    seed: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is drafted for, with the prompts to sample from."""

    version: Version
    prompts: Sequence[Sequence[int]]
    num_threads: int

    def sampled(
        self, config: CollectConfig, max_batch: int, speculate: Speculate | None = None
    ) -> list[SampleOutput]:
        requests = [
            SampleRequest(
                np.array(prompt, np.int32),
                config.samples,
                SamplingParams(config.tokens, config.seed + i, config.temperature),
            )
            for i, prompt in enumerate(self.prompts)
        ]
        engines = EngineFactory(max_batch, KV_CACHE_BYTES, self.num_threads, speculate)
        workload = Workload("prompts", self.version, tuple(requests))
        return run_timed(engines.make(drafts=speculate is not None), workload).outputs


class CaseRecorder:
    """An observer of drafts that keeps every disagreement, and some agreed cases."""

    version_lag = 0

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
    outputs = target.sampled(config, max_batch=64)
    return [
        Text(
            len(prompt),
            np.concatenate([prompt, sequence.tokens]).astype(np.int32),
            config.temperature,
        )
        for prompt, output in zip(target.prompts, outputs, strict=True)
        for sequence in output.sequences
    ]


def collected(
    target: Target, drafter: HeadDrafter, config: CollectConfig, store: CaseStore
) -> AcceptanceSummary:
    """Samples with the head drafting for every sample; its cases go to the store."""
    speculations: list[Speculation] = []

    def speculate(base: BaseModel, runner: Runner, pool: BlockPool) -> Speculation:
        runner.capture(base, drafter.layers)
        guard = GuardedDrafter(drafter, base.config.vocab_size)
        speculations.append(
            Speculation(guard, FixedLength(DRAFT_LENGTH), None, CaseRecorder(store))
        )
        return speculations[-1]

    target.sampled(config, max_batch=16, speculate=speculate)
    return AcceptanceSummary.of(speculations[0].snapshot())
