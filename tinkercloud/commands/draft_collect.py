"""What is done with a draft head while no server runs: watching it draft, collecting where it was
wrong, and teaching it by that.

The model writes with the head beside it, which changes nothing of what is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tinkercloud.commands import bench
from tinkercloud.commands.draft_distill import MOST_BYTES, Say, requests_of
from tinkercloud.embedded.draft_training.dataset import Mix, SequenceDataset
from tinkercloud.embedded.draft_training.driver import (
    Gate,
    TrainingDriver,
    TrainingResult,
    TrainingSettings,
)
from tinkercloud.embedded.draft_training.fit import Evaluation, Plan, joined
from tinkercloud.embedded.draft_training.head_trainer import (
    HeadObjective,
    HeadTrainer,
    SequenceMetadata,
)
from tinkercloud.embedded.draft_training.reference_capture import capture
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.embedded.sampling.speculation import Speculation
from tinkercloud.errors import UserError
from tinkercloud.speculative.draft_length.fixed_length import FixedLength
from tinkercloud.speculative.drafters.drafter import Stream
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter
from tinkercloud.speculative.head.head import Head
from tinkercloud.speculative.learning.cases import Case, CaseStore
from tinkercloud.speculative.learning.collecting import (
    CaseCollector,
    CollectorSettings,
    JudgedToken,
)
from tinkercloud.speculative.learning.draft_folder import DraftFolder
from tinkercloud.speculative.learning.schedule import TimeBudget

HeadParams = tuple[Head, dict[str, Tensor]]
"""A head and its parameters."""
DRAFTED = 4  # tokens of each draft
LEAST_CONTEXT = 8  # tokens of a text that is learned from


@dataclass(frozen=True, slots=True)
class CollectConfig:
    """samples: of each prompt, `tokens` of each. seed: another one writes other samples."""

    samples: int = 4
    tokens: int = 64
    temperature: float = 1.0
    seed: int = 1_000_000


@dataclass(frozen=True, slots=True)
class AcceptanceSummary:
    """Of a head in the engine. by_depth: the share of verified tokens that stood. per_pass: tokens
    that a pass brings a sample."""

    by_depth: tuple[float, ...]
    per_pass: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Target:
    """The model, ready to go on from these prompts."""

    version: Version
    prompts: Sequence[Sequence[int]]
    num_threads: int


@dataclass(frozen=True, slots=True)
class FinetuneConfig:
    """Where what is learned goes, and how long it may take."""

    folder: DraftFolder
    minutes: float


class CaseRecorder:
    """A listener that keeps every case."""

    def __init__(self, store: CaseStore):
        everything = CollectorSettings(per_second=1e9, burst=1e9, agreed_one_in=4)
        self._collector = CaseCollector(store, everything)

    version_lag = 0

    def drafted(self, category: str, num_judged: int, num_accepted: int) -> None:
        """The engine counts them too."""

    def judged(self, stream: Stream, verdict: JudgedToken, category: str) -> None:
        self._collector.judged(stream, verdict, category)

    def ended(self, stream: Stream) -> None:
        self._collector.ended(stream)


def collected(
    target: Target, drafter: HeadDrafter, config: CollectConfig, store: CaseStore
) -> AcceptanceSummary:
    """The model writes with the head drafting for every sample; its cases go to the store."""
    made: list[Speculation] = []

    def make(base: BaseModel, runner: Runner, pool: BlockPool) -> Speculation:
        runner.capture(base, drafter.layers)
        guard = GuardedDrafter(drafter, base.config.vocab_size)
        made.append(Speculation(guard, FixedLength(DRAFTED), None, CaseRecorder(store)))
        return made[-1]

    engine = SamplingEngine(
        max_batch=16, kv_cache_bytes=2**30, num_threads=target.num_threads, speculate=make
    )
    requests = requests_of(target.prompts, config)
    bench.run_timed(engine, bench.Workload("prompts", target.version, tuple(requests)))
    return _summary(made[0].snapshot())


def _summary(told: dict[str, Any]) -> AcceptanceSummary:
    depths = told["drafters"]["head"]["depths"]
    shares = [depth["accepted"] / max(1, depth["verified"]) for depth in depths]
    return AcceptanceSummary(tuple(shares), told["tokens_per_sequence_forward"], told["tokens"])


def finetuned(
    version: Version, head: HeadParams, store: CaseStore, config: FinetuneConfig, say: Say
) -> TrainingResult:
    """Trains the head on the texts in which it was wrong, and uses it where it is better on those
    that are held out. Raises UserError where there is too little text."""
    texts: dict[str, Case] = {}  # of each its first case, where the model's own words had begun
    for case in (*store.disagreed, *store.agreed):
        if case.context not in texts or case.position < texts[case.context].position:
            texts[case.context] = case
    dataset = SequenceDataset(MOST_BYTES, 1, Mix(batch_size=8))
    for case in texts.values():
        tokens = store.whole(case)
        if len(tokens) >= LEAST_CONTEXT:
            told = SequenceMetadata(case.position, case.temperature, 0)
            dataset.add(capture(version, tokens, head[0].config.layers, told))
    if not dataset.held_out():
        raise UserError(f"{len(texts)} texts are too few to learn from; collect more")
    budget = TimeBudget(share=1.0)
    budget.step_took(60.0 * config.minutes)
    driver = TrainingDriver(
        HeadTrainer(*head, HeadObjective()),
        dataset,
        config.folder,
        budget,
        TrainingSettings(Plan(num_steps=200, peak_rate=5e-4, warmup_steps=10), gate=Gate(0.0, 64)),
    )
    say(f"{len(texts)} texts, {len(store)} cases; training for {config.minutes:g} minutes at most")
    result = driver.work(f"{len(store)} collected cases") or driver.finish()
    if result is None or not result.losses:
        raise UserError(f"{config.minutes:g} minutes were too short to train in; give more")
    return result


def evaluated(version: Version, head: HeadParams, texts: Sequence[tuple[int, Any]]) -> Evaluation:
    """What is expected of a head on texts, (prompt tokens, tokens) each."""
    trainer = HeadTrainer(*head, HeadObjective())
    return joined(
        [
            trainer.evaluate(
                [capture(version, tokens, head[0].config.layers, SequenceMetadata(n, 1.0, 0))]
            )
            for n, tokens in texts
            if len(tokens) > n + 1
        ]
    )
