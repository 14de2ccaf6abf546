"""Training of draft heads while no server runs: distilled from the model's own samples, or
finetuned on the texts in which the best head was wrong.

A part of the texts is held out, and a head is judged there, by how many of its tokens are expected
to be accepted.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tinkercloud.commands.draft_collect import CollectConfig, HeadParams, Text
from tinkercloud.embedded.draft_training.capture import (
    CapturedSequence,
    SequenceMetadata,
    capture_sequence,
)
from tinkercloud.embedded.draft_training.dataset import Mix, SequenceDataset
from tinkercloud.embedded.draft_training.driver import (
    Evaluation,
    Gate,
    Plan,
    TrainingDriver,
    TrainingResult,
    TrainingSettings,
    joined,
)
from tinkercloud.embedded.draft_training.files import frozen_rows
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
MIN_TOKENS, MIN_FINETUNE_TOKENS = 3, 8  # of a text that is learned from
SECTION_S = 20.0  # between two lines of progress


@dataclass(frozen=True, slots=True)
class DistillConfig(CollectConfig):
    """vocabulary: tokens that the head can draft. minutes: of training at most. The seed is that of
    samples, batches and the first parameters."""

    samples: int = 16
    tokens: int = 96
    seed: int = 0
    vocabulary: int = 8192
    minutes: float = 15.0
    plan: Plan = field(default_factory=lambda: Plan(num_steps=600, warmup_steps=30))


@dataclass(frozen=True, slots=True)
class FinetuneConfig:
    """folder: gets the draft. minutes: of training at most."""

    folder: DraftFolder
    minutes: float
    plan: Plan = field(default_factory=lambda: Plan(num_steps=200, peak_rate=5e-4, warmup_steps=10))
    gate: Gate = field(default_factory=lambda: Gate(least_rows=64))


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
    dataset = _dataset(version, head, texts, config.seed, say)
    if not dataset.held_out():
        raise UserError("too little text to hold a part of it out; ask for more samples")
    notes = {"num_tokens": int(counts.sum()), "coverage": vocabulary.coverage(counts)}
    trainer = HeadTrainer(head, initial_params(head_config, config.seed), HeadObjective())
    settings = TrainingSettings(config.plan, gate=None, notes=notes)
    driver = TrainingDriver(trainer, dataset, folder, TimeBudget(share=1.0), settings)
    reason = "distilled from the model's own samples"
    return _trained(driver, reason, config.minutes, say)


def finetuned(
    version: Version, head: HeadParams, store: CaseStore, config: FinetuneConfig, say: Say
) -> TrainingResult:
    """The head learns from the texts in which it was wrong, and is used where it is better on those
    held out. Raises UserError where there is too little text."""
    cases: dict[str, Case] = {}  # of each text its first, where the model's own words had begun
    for case in (*store.disagreed, *store.agreed):
        if case.context not in cases or case.position < cases[case.context].position:
            cases[case.context] = case
    texts = [Text(c.position, store.whole(c), c.temperature) for c in cases.values()]
    texts = [text for text in texts if len(text.tokens) >= MIN_FINETUNE_TOKENS]
    dataset = _dataset(version, head[0], texts, 0, say)
    if not dataset.held_out():
        raise UserError(f"{len(cases)} texts are too few to learn from; collect more")
    say(f"{len(cases)} texts, {len(store)} cases; training for {config.minutes:g} minutes at most")
    trainer = HeadTrainer(*head, HeadObjective())
    settings = TrainingSettings(config.plan, gate=config.gate)
    driver = TrainingDriver(trainer, dataset, config.folder, TimeBudget(share=1.0), settings)
    return _trained(driver, f"{len(store)} collected cases", config.minutes, say)


def evaluated(version: Version, head: HeadParams, texts: Sequence[Text]) -> Evaluation:
    """What is expected of a head on these texts."""
    trainer = HeadTrainer(*head, HeadObjective())
    layers = head[0].config.layers
    return joined(
        [
            trainer.evaluate([_captured(version, text, layers)])
            for text in texts
            if len(text.tokens) > text.num_prompt + 1
        ]
    )


def _captured(version: Version, text: Text, layers: Sequence[int]) -> CapturedSequence:
    meta = SequenceMetadata(text.temperature, 0)
    return capture_sequence(version, text.tokens, layers, text.num_prompt, meta)


def _dataset(
    version: Version, head: Head, texts: Sequence[Text], seed: int, say: Say
) -> SequenceDataset:
    dataset = SequenceDataset(MAX_BYTES, 1, Mix(batch_size=8, seed=seed))
    began = time.monotonic()
    for i, text in enumerate(texts):
        dataset.add(_captured(version, text, head.config.layers))
        if time.monotonic() - began > SECTION_S:
            began = time.monotonic()
            say(f"read {i + 1} of {len(texts)} texts")
    return dataset


def _trained(driver: TrainingDriver, reason: str, minutes: float, say: Say) -> TrainingResult:
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
