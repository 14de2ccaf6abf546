"""Training a draft head from what the policy's own passes have computed anyway.

A row of a captured sequence is one token: the hidden states after it and the target's law of the
next one. Nothing of the policy is run and nothing flows back into it.

Axes: B sequences, N tokens, L fused layers, D hidden, M most probable tokens, J steps of the
unrolled head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tinkercloud.embedded.draft_training.fit import Evaluation
from tinkercloud.errors import UserError
from tinkercloud.speculative.head.head import Head
from tinkercloud.speculative.head.losses import (
    MEASURES,
    Teacher,
    distances,
    expected_acceptance,
    most_probable,
    on_vocabulary,
    weighted_mean,
)
from tinkercloud.speculative.head.unroll import unroll
from tinkercloud.weights.checkpoints import read_tensors, write_tensors

HEAD_FILE = "head.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class CapturedSequence:
    """One sequence as the policy has seen it, N >= 2.

    tokens int32 (N,); hidden (N, L, D) of the head's layers; top_ids int32 and top_probs float32
    (N, M): the law after each token, at `temperature`; weights float32 (N,): what each law counts.
    """

    tokens: NDArray[np.int32]
    hidden: NDArray[np.floating]
    top_ids: NDArray[np.int32]
    top_probs: NDArray[np.float32]
    weights: NDArray[np.float32]
    temperature: float
    epoch: int
    category: str = ""

    @classmethod
    def of(
        cls, tokens: Tensor, hidden: Tensor, logits: Tensor, told: "SequenceMetadata"
    ) -> "CapturedSequence":
        """logits (N, V) of the policy; the arrays are copies, on the CPU."""
        z = logits.detach().float() / (told.temperature or 1.0)
        teacher = most_probable(torch.softmax(z, -1), told.count)
        weights = np.ones(len(tokens), np.float32)
        weights[: max(told.num_prompt - 1, 0)] = 0.0
        return cls.taught(tokens.cpu().numpy(), hidden, teacher, weights, told)

    @classmethod
    def taught(
        cls,
        tokens: NDArray[np.integer],
        hidden: Tensor,
        teacher: Teacher,
        weights: NDArray[np.float32],
        told: "SequenceMetadata",
    ) -> "CapturedSequence":
        """teacher: the M most probable tokens after each token. weights count, not num_prompt."""
        assert teacher.ids is not None
        return cls(
            tokens.astype(np.int32),
            hidden.detach().to(torch.float32, copy=True).cpu().numpy(),
            teacher.ids.cpu().numpy().astype(np.int32),
            teacher.probs.cpu().numpy(),
            weights,
            told.temperature,
            told.epoch,
            told.category,
        )

    @property
    def num_bytes(self) -> int:
        arrays = (self.tokens, self.hidden, self.top_ids, self.top_probs, self.weights)
        return sum(array.nbytes for array in arrays)


@dataclass(frozen=True, slots=True)
class SequenceMetadata:
    """What is known of a sequence beside its arrays. count: tokens of each law that are kept."""

    num_prompt: int
    temperature: float
    epoch: int
    count: int = 32
    category: str = ""


@dataclass(frozen=True, slots=True)
class HeadObjective:
    """measure: a key of MEASURES. num_steps: how far the head is unrolled on its own outputs.
    step_share: what a step counts beside the one before."""

    measure: str = "lk"
    num_steps: int = 3
    step_share: float = 0.8


@dataclass(frozen=True, slots=True)
class _Rows:
    """Padded: row i reads hidden i and token i + 1, and is taught the law of token i + 2."""

    hidden: Tensor  # (B, N - 1, L, D)
    tokens: Tensor  # (B, N - 1)
    teacher: Teacher  # (B, N - 1, M) each, ids of the draft
    weights: Tensor  # (B, N - 1), 0 for padding
    temperature: Tensor  # (B, N - 1)


class HeadTrainer:
    """params are the trainer's own; the head's frozen rows are the policy's and stay the same."""

    def __init__(self, head: Head, params: Mapping[str, Tensor], training: HeadObjective):
        self._head, self._training = head, training
        own = head.placed(params)
        self._params = {n: t.detach().clone().requires_grad_() for n, t in own.items()}

    @property
    def params(self) -> dict[str, Tensor]:
        return self._params

    def loss(self, batch: Sequence[CapturedSequence]) -> Tensor:
        rows = self._collate(batch)
        training = self._training
        outputs = unroll(self._head, self._params, rows.hidden, rows.tokens, training.num_steps)
        losses, weights = [], []
        for step, output in enumerate(outputs):
            told = _from(rows.weights, step) > 0
            logits = self._head.logits(self._params, output[told])
            teacher, temperature = _taught(rows.teacher, told), rows.temperature[told]
            measure = MEASURES[training.measure]
            losses.append(distances(logits, teacher, temperature, measure))
            weights.append(rows.weights[told] * training.step_share**step)
        return weighted_mean(torch.cat(losses), torch.cat(weights))

    @torch.no_grad()
    def evaluate(self, batch: Sequence[CapturedSequence]) -> Evaluation:
        rows = self._collate(batch)
        outputs = unroll(
            self._head, self._params, rows.hidden, rows.tokens, self._training.num_steps
        )
        begins = rows.weights > 0
        survives = begins.double()
        expected = torch.zeros_like(survives)
        by_depth = []
        for step, output in enumerate(outputs):
            told = _from(rows.weights, step) > 0
            alpha = torch.zeros_like(survives)
            logits = self._head.logits(self._params, output[told])
            taught = _taught(rows.teacher, told)
            alpha[told] = expected_acceptance(logits, taught, rows.temperature[told]).double()
            by_depth.append(float(alpha[told].mean()) if told.any() else 0.0)
            survives = survives * _earlier(alpha, step)
            expected += survives
        return Evaluation(expected[begins].cpu().numpy(), tuple(by_depth))

    def write(self, params: Mapping[str, Tensor], directory: Path) -> None:
        more = {
            "vocabulary": self._head.frozen.vocabulary.ids,
            "layers": torch.tensor(self._head.config.layers),
        }
        write_tensors({**params, **more}, directory / HEAD_FILE)

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

    def _collate(self, batch: Sequence[CapturedSequence]) -> _Rows:
        device = self._head.device
        ids = _padded([s.top_ids[1:].astype(np.int64) for s in batch], device)
        probs = _padded([s.top_probs[1:] for s in batch], device)
        index = self._head.vocabulary.index
        weights = _padded([s.weights[1:] for s in batch], device)
        temperature = torch.tensor([s.temperature for s in batch], device=device)
        return _Rows(
            _padded([s.hidden[:-1] for s in batch], device),
            _padded([s.tokens[1:].astype(np.int64) for s in batch], device),
            on_vocabulary(Teacher(probs, ids, 1.0 - probs.sum(-1)), index),
            weights,
            temperature[:, None].expand_as(weights),
        )


def _padded(arrays: Sequence[NDArray], device: torch.device) -> Tensor:
    return pad_sequence([torch.from_numpy(a) for a in arrays], batch_first=True).to(device)


def _from(weights: Tensor, step: int) -> Tensor:
    """The weights of the rows that a draft of `step` tokens before them can reach."""
    reached = weights.clone()
    reached[:, :step] = 0.0
    return reached


def _earlier(x: Tensor, count: int) -> Tensor:
    """Row i of the result is row i + count, zeros behind the last."""
    return torch.nn.functional.pad(x, (0, count))[:, count:]


def _taught(teacher: Teacher, told: Tensor) -> Teacher:
    assert teacher.ids is not None
    assert teacher.rest is not None
    return Teacher(teacher.probs[told], teacher.ids[told], teacher.rest[told])
