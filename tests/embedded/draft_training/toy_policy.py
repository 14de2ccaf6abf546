"""A policy whose hidden state after a token follows from that token alone, so that what a head has
to learn, and a planted shift of it, are known."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.embedded.tiny import open_store
from tests.speculative.head.head_scene import D, V, target_config, target_weights
from tinkercloud.core.types import FromBase
from tinkercloud.embedded.draft_training.capture import CapturedSequence, SequenceMetadata
from tinkercloud.embedded.draft_training.dataset import Mix, SequenceDataset
from tinkercloud.embedded.draft_training.fit import Fit, Plan, Trainer, assign, gradients
from tinkercloud.embedded.draft_training.head_trainer import HeadObjective, HeadTrainer
from tinkercloud.embedded.model.version import Version
from tinkercloud.speculative.head.head import FrozenRows, Head, HeadConfig, initial_params
from tinkercloud.speculative.head.vocabulary import DraftVocabulary
from tinkercloud.speculative.learning.schedule import TimeBudget

LENGTH = 24
RATE = 1e-2
ROOM_BYTES = 1 << 26
ALL = range(V)


class ToyPolicy:
    """says: the tokens that it ever draws. Another seed is another policy."""

    def __init__(self, seed: int, says: range = ALL):
        generator = torch.Generator().manual_seed(1000 + seed)
        self.weights = target_weights()
        turn = torch.linalg.qr(torch.randn(D, D, generator=generator))[0]
        self.after = self.weights["model.embed_tokens"] @ turn  # (V, D)
        self.logits = self.after @ self.weights["lm_head"].T * 0.5
        silent = [x for x in range(V) if x not in says]
        self.logits[:, silent] = -30.0
        self.says = says

    def sequence(self, seed: int, epoch: int = 0, temperature: float = 1.0) -> CapturedSequence:
        coins = np.random.default_rng(seed)
        tokens = [int(coins.choice(self.says))]
        probs = torch.softmax(self.logits.double(), -1).numpy()
        while len(tokens) < LENGTH:
            tokens.append(int(coins.choice(V, p=probs[tokens[-1]])))
        ids = torch.tensor(tokens)
        metadata = SequenceMetadata(temperature, epoch, top=16)
        return CapturedSequence.from_logits(
            ids, self.after[ids][:, None], self.logits[ids], 2, metadata
        )

    def sequences(self, count: int, first_seed: int, epoch: int = 0) -> list[CapturedSequence]:
        return [self.sequence(first_seed + i, epoch) for i in range(count)]


def trainer_of(
    weights: dict[str, Tensor], training: HeadObjective | None = None, seed: int = 0
) -> HeadTrainer:
    config = HeadConfig.of(target_config(), (4,))
    head = Head(config, FrozenRows.of(weights, DraftVocabulary.of(ALL, V)))
    return HeadTrainer(head, initial_params(config, seed), training or HeadObjective())


def endless() -> TimeBudget:
    budget = TimeBudget(1.0, 1e9)
    budget.step_took(1e9)
    return budget


def fitted(trainer, dataset, num_steps: int = 100) -> list[float]:
    fit = Fit(trainer, dataset.batch, Plan(num_steps=num_steps, peak_rate=RATE))
    fit.advance(endless())
    return fit.losses


def filled(policy: ToyPolicy, count: int = 48, **mix: object) -> SequenceDataset:
    dataset = SequenceDataset(ROOM_BYTES, 4, Mix(**mix))
    for sequence in policy.sequences(count, 0):
        dataset.add(sequence)
    return dataset


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def same_gradients(trainer: Trainer[Any], batch: Any, parts: Sequence[tuple[Any, float]]) -> None:
    loss, expected = gradients(trainer, batch)
    found = [gradients(trainer, part) for part, _ in parts]
    shares = [share for _, share in parts]
    assert sum(shares) == pytest.approx(1.0)
    assert sum(s * of for s, (of, _) in zip(shares, found, strict=True)) == pytest.approx(loss)
    for name, gradient in expected.items():
        total = sum(s * of[name] for s, (_, of) in zip(shares, found, strict=True))
        torch.testing.assert_close(total, gradient, rtol=1e-4, atol=1e-6)


def copy_of(trainer: HeadTrainer, policy: ToyPolicy) -> HeadTrainer:
    other = trainer_of(policy.weights)
    assign(other, trainer.params)
    return other


def tiny_version(folder: Path) -> Version:
    store = open_store(folder)
    return store.version(store.publish(FromBase("tiny")))
