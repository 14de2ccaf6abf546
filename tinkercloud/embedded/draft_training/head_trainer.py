"""Training of a draft head on sequences that the policy's passes have left.

A row of a captured sequence is one token: the hidden states after it and the target's distribution
of the next one. The policy is not run, and no gradient flows into it.

Axes: B sequences, N tokens, L fused layers, D hidden, V vocabulary, M most probable tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tinkercloud.embedded.draft_training.capture import CapturedSequence
from tinkercloud.embedded.draft_training.files import HEAD_FILE
from tinkercloud.embedded.draft_training.fit import Evaluation
from tinkercloud.errors import UserError
from tinkercloud.speculative.head.head import Head
from tinkercloud.speculative.head.losses import (
    MEASURES,
    Teacher,
    distances,
    expected_acceptance,
    on_vocabulary,
    weighted_mean,
)
from tinkercloud.speculative.head.unroll import unroll
from tinkercloud.weights.checkpoints import read_tensors, write_tensors


@dataclass(frozen=True, slots=True)
class HeadObjective:
    """measure: a key of MEASURES. num_steps: how far the head is unrolled on its own outputs.
    step_share: what a step counts relative to the one before."""

    measure: str = "lk"
    num_steps: int = 3
    step_share: float = 0.8


@dataclass(frozen=True, slots=True)
class _Batch:
    """Padded: row i reads hidden i and token i + 1, and learns the distribution of token i + 2."""

    hidden: Tensor  # (B, N - 1, L, D)
    tokens: Tensor  # (B, N - 1)
    teacher: Teacher  # (B, N - 1, M) each, ids of the draft
    weights: Tensor  # (B, N - 1), 0 for padding
    temperature: Tensor  # (B, N - 1)


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of the unrolled head, n rows. mask (B, N - 1): which rows they are."""

    mask: Tensor
    logits: Tensor  # (n, V)
    teacher: Teacher
    temperature: Tensor  # (n,)


class HeadTrainer:
    """The parameters are copies of those given; the head's frozen rows are the policy's."""

    def __init__(self, head: Head, params: Mapping[str, Tensor], objective: HeadObjective):
        self._head, self._objective = head, objective
        placed = head.placed(params)
        self._params = {n: t.detach().clone().requires_grad_() for n, t in placed.items()}

    @property
    def params(self) -> dict[str, Tensor]:
        return self._params

    def loss(self, batch: Sequence[CapturedSequence]) -> Tensor:
        padded, measure = self._collate(batch), MEASURES[self._objective.measure]
        losses, weights = [], []
        for number, step in enumerate(self._unrolled(padded)):
            losses.append(distances(step.logits, step.teacher, step.temperature, measure))
            weights.append(padded.weights[step.mask] * self._objective.step_share**number)
        return weighted_mean(torch.cat(losses), torch.cat(weights))

    def parts(
        self, batch: Sequence[CapturedSequence]
    ) -> Sequence[tuple[Sequence[CapturedSequence], float]]:
        """Sequence by sequence."""
        weights = [self._weight(sequence) for sequence in batch]
        total = sum(weights)
        if not total:
            return [(batch, 1.0)]
        pairs = zip(batch, weights, strict=True)
        return [([sequence], weight / total) for sequence, weight in pairs if weight]

    def _weight(self, sequence: CapturedSequence) -> float:
        """Of all its rows, at all steps."""
        objective, rows = self._objective, sequence.weights[1:]
        steps = range(objective.num_steps)
        return sum(objective.step_share**step * float(rows[step:].sum()) for step in steps)

    @torch.no_grad()
    def evaluate(self, batch: Sequence[CapturedSequence]) -> Evaluation:
        padded = self._collate(batch)
        first_rows = padded.weights > 0
        survival = (
            first_rows.double()
        )  # chance that all tokens of the draft up to here are accepted
        expected = torch.zeros_like(survival)
        by_depth = []
        for number, step in enumerate(self._unrolled(padded)):
            alpha = torch.zeros_like(survival)
            alpha[step.mask] = expected_acceptance(
                step.logits, step.teacher, step.temperature
            ).double()
            by_depth.append(float(alpha[step.mask].mean()) if step.mask.any() else 0.0)
            survival = survival * _shifted(alpha, number)
            expected += survival
        return Evaluation(expected[first_rows].cpu().numpy(), tuple(by_depth))

    def write(self, params: Mapping[str, Tensor], directory: Path) -> None:
        fixed = {
            "vocabulary": self._head.frozen.vocabulary.ids,
            "layers": torch.tensor(self._head.config.layers),
        }
        write_tensors({**params, **fixed}, directory / HEAD_FILE)

    def read(self, directory: Path) -> dict[str, Tensor]:
        tensors = read_tensors(directory / HEAD_FILE)
        ids = tensors.pop("vocabulary", torch.zeros(0))
        layers = tensors.pop("layers", torch.zeros(0)).tolist()
        shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        if shapes != self._head.config.shapes() or tuple(layers) != self._head.config.layers:
            raise UserError(f"the draft head in {directory} is not one of this model")
        if not torch.equal(ids, self._head.frozen.vocabulary.ids):
            raise UserError(f"the draft head in {directory} has another vocabulary")
        return tensors

    def _unrolled(self, batch: _Batch) -> Iterator[_Step]:
        """Step k has the rows that a draft begun k tokens earlier reaches."""
        head, params = self._head, self._params
        outputs = unroll(head, params, batch.hidden, batch.tokens, self._objective.num_steps)
        for number, output in enumerate(outputs):
            mask = batch.weights > 0
            mask[:, :number] = False
            teacher = batch.teacher
            assert teacher.ids is not None
            assert teacher.rest is not None
            masked = Teacher(teacher.probs[mask], teacher.ids[mask], teacher.rest[mask])
            yield _Step(mask, head.logits(params, output[mask]), masked, batch.temperature[mask])

    def _collate(self, batch: Sequence[CapturedSequence]) -> _Batch:
        device = self._head.device
        ids = _padded([s.top_ids[1:].astype(np.int64) for s in batch], device)
        probs = _padded([s.top_probs[1:] for s in batch], device)
        weights = _padded([s.weights[1:] for s in batch], device)
        temperature = torch.tensor([s.temperature for s in batch], device=device)
        return _Batch(
            _padded([s.hidden[:-1] for s in batch], device),
            _padded([s.tokens[1:].astype(np.int64) for s in batch], device),
            on_vocabulary(Teacher(probs, ids, 1.0 - probs.sum(-1)), self._head.vocabulary.index),
            weights,
            temperature[:, None].expand_as(weights),
        )


def _padded(arrays: Sequence[NDArray], device: torch.device) -> Tensor:
    return pad_sequence([torch.from_numpy(a) for a in arrays], batch_first=True).to(device)


def _shifted(x: Tensor, count: int) -> Tensor:
    """Row i of the result is row i + count, zeros behind the last."""
    return torch.nn.functional.pad(x, (0, count))[:, count:]
