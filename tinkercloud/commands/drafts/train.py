"""Training of drafts while no server runs: of a new one on the model's own samples, or of the best
one on the texts in which it was wrong.

A part of the texts is held out, and a draft is judged there, by how many of its tokens are expected
to be accepted.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tinkercloud.commands.drafts.collect import CollectConfig, Text
from tinkercloud.commands.drafts.kinds import (
    HeadKind,
    HeadWeights,
    ModelKind,
    captured,
    cases_of,
)
from tinkercloud.config import DraftConfig
from tinkercloud.embedded.draft_training.dataset import CaseDataset, Mix, SequenceDataset
from tinkercloud.embedded.draft_training.driver import (
    NEW_RATE,
    Dataset,
    Gate,
    TrainingDriver,
    TrainingResult,
    TrainingSettings,
)
from tinkercloud.embedded.draft_training.files import UNTRAINED, VOCABULARY, frozen_rows
from tinkercloud.embedded.draft_training.fit import Plan, Trainer, joined
from tinkercloud.embedded.draft_training.head_trainer import HeadObjective, HeadTrainer
from tinkercloud.embedded.model.version import Version
from tinkercloud.errors import UserError
from tinkercloud.speculative.head.head import Head, HeadConfig, initial_params
from tinkercloud.speculative.head.vocabulary import DraftVocabulary
from tinkercloud.speculative.learning.cases import Case, CaseStore
from tinkercloud.speculative.learning.draft_folder import DraftFolder
from tinkercloud.speculative.learning.schedule import TimeBudget

Say = Callable[[str], None]
MAX_BYTES = 2 * 1024**3  # of captured sequences
CASE_BYTES, MAX_AGE = 64 * 1024**2, 10**6
MIN_TOKENS, MIN_FINETUNE_TOKENS = 3, 8  # of a text that is learned from
SECTION_S = 20.0  # between two lines of progress


@dataclass(frozen=True, slots=True)
class DistillConfig(CollectConfig):
    """vocabulary: tokens that a head can draft. minutes: of training at most. The seed is that of
    samples, batches and the first parameters. replay_share: of a batch, from agreed cases."""

    samples: int = 16
    tokens: int = 96
    seed: int = 0
    vocabulary: int = VOCABULARY
    minutes: float = 15.0
    replay_share: float = 0.2
    plan: Plan = field(default_factory=lambda: Plan(num_steps=600, warmup_steps=30))

    @classmethod
    def of(cls, settings: DraftConfig, sizes: tuple[int, int], minutes: float) -> "DistillConfig":
        """sizes: samples of each prompt, tokens of each."""
        plan = Plan(num_steps=600, warmup_steps=30, peak_rate=NEW_RATE * settings.rate)
        share = settings.replay_share
        return cls(*sizes, minutes=minutes, replay_share=share, plan=plan)

    @property
    def mix(self) -> Mix:
        return Mix(batch_size=8, share=1 - self.replay_share, seed=self.seed)


@dataclass(frozen=True, slots=True)
class FinetuneConfig:
    """minutes: of training at most. goal: of the first drafted tokens accepted, from which on there
    is nothing to learn. replay_share: as in DistillConfig."""

    minutes: float
    goal: float = 1.0
    replay_share: float = 0.2
    plan: Plan = field(default_factory=lambda: Plan(num_steps=200, peak_rate=5e-4, warmup_steps=10))
    gate: Gate = field(default_factory=lambda: Gate(least_rows=64))

    @classmethod
    def of(cls, settings: DraftConfig, minutes: float) -> "FinetuneConfig":
        plan = Plan(num_steps=200, peak_rate=settings.rate, warmup_steps=10)
        return cls(minutes, settings.acceptance, settings.replay_share, plan)

    @property
    def mix(self) -> Mix:
        return Mix(batch_size=8, share=1 - self.replay_share)


def distilled(
    version: Version, texts: Sequence[Text], config: DistillConfig, folder: DraftFolder, say: Say
) -> TrainingResult:
    """A new head becomes the model's best, whatever was there. Raises UserError where there is too
    little text."""
    counts = torch.zeros(version.base.config.vocab_size, dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(torch.from_numpy(text.tokens).long(), minlength=len(counts))
    vocabulary = DraftVocabulary.most_frequent(
        counts, min(config.vocabulary, len(counts)), version.base.config.eos_token_ids
    )
    head_config = HeadConfig.of(version.base.config)
    head = Head(head_config, frozen_rows(version.base, vocabulary))
    texts = [text for text in texts if len(text.tokens) >= MIN_TOKENS]
    dataset = _sequences(version, head, texts, config.mix, say)
    notes = {"num_tokens": int(counts.sum()), "coverage": vocabulary.coverage(counts)}
    trainer = HeadTrainer(head, initial_params(head_config, config.seed), HeadObjective())
    settings = TrainingSettings(config.plan, gate=None, notes=notes)
    driver = _driver(trainer, dataset, folder, settings)
    return _trained(driver, "distilled from the model's own samples", config.minutes, say)


def distilled_model(
    version: Version, texts: Sequence[Text], config: DistillConfig, kind: ModelKind, say: Say
) -> TrainingResult:
    """A new adapter of the draft model becomes the best, whatever was there. Raises UserError where
    there is too little text, or the draft has other tokens."""
    trainer = kind.trainer(kind.untrained())
    store = CaseStore(MAX_BYTES, MAX_AGE)
    for text in _with_progress(texts, say):
        for example in cases_of(version, text):
            store.add(text.tokens, example.case)
    settings = TrainingSettings(config.plan, gate=None, notes={"num_tokens": len(store)})
    driver = _driver(trainer, CaseDataset(store, config.mix), kind.folder, settings)
    if kind.folder.find("best") is None:  # a rollback needs a version to return to
        driver.publish({"reason": UNTRAINED})
    return _trained(driver, "distilled from the model's own samples", config.minutes, say)


def finetuned(
    version: Version,
    kind: HeadKind | ModelKind,
    store: CaseStore,
    config: FinetuneConfig,
    say: Say,
) -> TrainingResult | None:
    """The best draft learns from where it was wrong, and is used where it is better on texts that
    are held out; None where it is good enough. Raises UserError where there is too little text."""
    trainer, dataset = _learner(version, kind, store, config, say)
    settings = TrainingSettings(config.plan, gate=config.gate)
    driver = _driver(trainer, dataset, kind.folder, settings)
    first = joined([trainer.evaluate(batch) for batch in dataset.held_out()]).by_depth[0]
    if first >= config.goal:
        say(f"{first:.0%} of first drafted tokens are expected to be accepted: that is enough")
        return None
    say(f"{len(store)} cases; training for {config.minutes:g} minutes at most")
    return _trained(driver, f"{len(store)} collected cases", config.minutes, say)


def _learner(
    version: Version,
    kind: HeadKind | ModelKind,
    store: CaseStore,
    config: FinetuneConfig,
    say: Say,
) -> tuple[Trainer[Any], Dataset[Any]]:
    if isinstance(kind, ModelKind):
        return kind.trainer(kind.named("best")), CaseDataset(store, config.mix)
    weights = kind.named("best")
    return kind.trainer(weights), _case_texts(version, weights, store, config, say)


def _case_texts(
    version: Version, weights: HeadWeights, store: CaseStore, config: FinetuneConfig, say: Say
) -> SequenceDataset:
    """The texts that cases lie in, as the target reads them now."""
    cases: dict[str, Case] = {}  # of each text its first, where the model's own words had begun
    for case in (*store.disagreed, *store.agreed):
        if case.context not in cases or case.position < cases[case.context].position:
            cases[case.context] = case
    texts = [Text(c.position, store.whole(c), c.temperature) for c in cases.values()]
    texts = [text for text in texts if len(text.tokens) >= MIN_FINETUNE_TOKENS]
    return _sequences(version, weights[0], texts, config.mix, say)


def _sequences(
    version: Version, head: Head, texts: Sequence[Text], mix: Mix, say: Say
) -> SequenceDataset:
    dataset = SequenceDataset(MAX_BYTES, 1, mix)
    for text in _with_progress(texts, say):
        dataset.add(captured(version, text, head.config.layers))
    return dataset


def _with_progress(texts: Sequence[Text], say: Say) -> Iterator[Text]:
    began = time.monotonic()
    for i, text in enumerate(texts):
        yield text
        if time.monotonic() - began > SECTION_S:
            began = time.monotonic()
            say(f"read {i + 1} of {len(texts)} texts")


def _driver(
    trainer: Trainer[Any], dataset: Dataset[Any], folder: DraftFolder, settings: TrainingSettings
) -> TrainingDriver[Any]:
    if not dataset.held_out():
        raise UserError("too little text to hold a part of it out; sample or collect more")
    return TrainingDriver(trainer, dataset, folder, TimeBudget(share=1.0), settings)


def _trained(driver: TrainingDriver[Any], reason: str, minutes: float, say: Say) -> TrainingResult:
    """Until the plan is done; where the time is over sooner, with the steps made so far."""
    result, left_s = None, 60.0 * minutes
    while result is None and left_s > 0:
        section_s = min(SECTION_S, left_s)
        left_s -= section_s
        driver.budget.step_took(section_s)
        result = driver.work(reason)
        losses = driver.losses if result is None else result.losses
        say(f"step {len(losses)} of {driver.num_steps}: loss {np.mean(losses[-20:]):.3f}")
    result = result or driver.finish()
    assert result is not None, "any time is enough for a step"
    return result
