"""What draft heads learn from: sequences with the hidden states and distributions that the policy
computes for them.

`PassCapture` copies them out of the policy's own training passes, which compute them anyway.
`capture_sequence` runs a pass of its own: for samples that no training has seen.

Axes: T packed rows of a pass, R captured rows, N tokens of a sequence, L fused layers, D hidden,
V vocabulary, M most probable tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.core.types import Datum
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.training.context import TrainContext
from tinkercloud.embedded.training.layout import Layout
from tinkercloud.embedded.training.observer import Datums
from tinkercloud.embedded.training.packed_context import frozen_context
from tinkercloud.speculative.head.losses import Teacher, most_probable
from tinkercloud.speculative.learning.cases import Tokens
from tinkercloud.speculative.learning.schedule import TimeBudget

MIN_TOKENS = 4  # of a datum worth learning from


@dataclass(frozen=True, slots=True)
class SequenceMetadata:
    """temperature: of the captured distributions, 0 counts as 1. epoch: as in replay_buffer.
    top: tokens of each distribution that are kept. category: the model."""

    temperature: float
    epoch: int
    top: int = 32
    category: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class CapturedSequence:
    """One sequence as the policy has seen it, N >= 2; arrays are copies on the CPU.

    tokens int32 (N,); hidden (N, L, D) of the head's layers; top_ids int32 and top_probs float32
    (N, M): the distribution after each token; weights float32 (N,): what each of them counts.
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
    def from_logits(
        cls, tokens: Tensor, hidden: Tensor, logits: Tensor, num_prompt: int, meta: SequenceMetadata
    ) -> "CapturedSequence":
        """logits (N, V) of the policy. A prompt's tokens are never drafted and count nothing."""
        probs = torch.softmax(logits.detach().float() / (meta.temperature or 1.0), -1)
        weights = np.ones(len(tokens), np.float32)
        weights[: max(num_prompt - 1, 0)] = 0.0
        teacher = most_probable(probs, meta.top)
        return cls.from_teacher(tokens.cpu().numpy(), hidden, teacher, weights, meta)

    @classmethod
    def from_teacher(
        cls,
        tokens: NDArray[np.integer],
        hidden: Tensor,
        teacher: Teacher,
        weights: NDArray[np.float32],
        meta: SequenceMetadata,
    ) -> "CapturedSequence":
        assert teacher.ids is not None
        return cls(
            tokens.astype(np.int32),
            hidden.detach().to(torch.float32, copy=True).cpu().numpy(),
            teacher.ids.cpu().numpy().astype(np.int32),
            teacher.probs.cpu().numpy(),
            weights,
            meta.temperature,
            meta.epoch,
            meta.category,
        )

    def window(self, first: int, length: int) -> "CapturedSequence":
        """So many of its tokens, from place `first` on; a copy, which holds nothing else."""
        part = slice(first, first + length)
        return replace(
            self,
            tokens=self.tokens[part].copy(),
            hidden=self.hidden[part].copy(),
            top_ids=self.top_ids[part].copy(),
            top_probs=self.top_probs[part].copy(),
            weights=self.weights[part].copy(),
        )

    @property
    def num_bytes(self) -> int:
        arrays = (self.tokens, self.hidden, self.top_ids, self.top_probs, self.weights)
        return sum(array.nbytes for array in arrays)


# ---- out of training passes


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """layers: as in HeadConfig. max_rows: of one pass. rotation: another one captures other datums
    where not all fit. metadata: of each share's sequences; temperature and top of all shares are
    those of the first."""

    layers: tuple[int, ...]
    max_rows: int
    rotation: int
    metadata: Sequence[SequenceMetadata]


@dataclass(frozen=True, slots=True)
class _Captured:
    """rows (N,) of the pass."""

    datum: Datum
    rows: NDArray[np.int64]
    meta: SequenceMetadata


class PassCapture:
    """The observer of one pass. add: takes every sequence. budget: is charged with the time, since
    copying is part of what drafts cost."""

    def __init__(
        self, settings: CaptureSettings, add: Callable[[CapturedSequence], None], budget: TimeBudget
    ):
        self._settings, self._add, self._budget = settings, add, budget
        self._captured: list[_Captured] = []
        self._rows = torch.empty(0, dtype=torch.int64)  # (R,) of the pass, ascending
        self._index = torch.empty(0, dtype=torch.int64)  # (T,): of each row among these, or -1
        self._hidden: dict[int, Tensor] = {}  # (R, D) by layer
        self._ids = self._probs = torch.empty(0)  # (R, M)

    def begin(self, shares: Sequence[Datums], layout: Layout) -> None:
        with self._budget.spending():
            self._captured = self._selection(shares, layout)
            # Datums share the rows of a common prompt: each row is copied once.
            parts = [captured.rows for captured in self._captured]
            rows = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
            index = np.full(len(layout.tokens), -1, np.int64)
            index[rows] = np.arange(len(rows))
            self._rows, self._index = torch.from_numpy(rows), torch.from_numpy(index)
            top = self._settings.metadata[0].top
            self._ids = torch.zeros(len(rows), top, dtype=torch.int64)
            self._probs = torch.zeros(len(rows), top)

    def block(self, number: int, x: Tensor) -> None:
        if self._captured and number in self._settings.layers:
            with self._budget.spending():
                self._hidden[number] = x[self._rows.to(x.device)].float().cpu()

    def distributions(self, rows: Tensor, probs: Tensor) -> None:
        with self._budget.spending():
            index = self._index[rows.cpu()]
            mask = index >= 0
            if not mask.any():
                return
            probs = at_temperature(
                probs[mask.to(probs.device)], self._settings.metadata[0].temperature
            )
            teacher = most_probable(probs, self._ids.shape[1])
            assert teacher.ids is not None
            count = teacher.ids.shape[1]  # a small vocabulary has fewer than `top`
            self._ids[index[mask], :count] = teacher.ids.cpu()
            self._probs[index[mask], :count] = teacher.probs.cpu()

    def end(self) -> None:
        with self._budget.spending():
            if not self._captured:
                return
            hidden = torch.stack([self._hidden[layer] for layer in self._settings.layers], 1)
            for captured in self._captured:
                self._add(self._sequence(captured, hidden))

    def _sequence(self, captured: _Captured, hidden: Tensor) -> CapturedSequence:
        index = self._index[torch.from_numpy(captured.rows)]
        teacher = Teacher(self._probs[index], self._ids[index], None)
        datum, weights = captured.datum, drafted_mask(captured.datum).astype(np.float32)
        return CapturedSequence.from_teacher(
            datum.tokens, hidden[index], teacher, weights, captured.meta
        )

    def _selection(self, shares: Sequence[Datums], layout: Layout) -> list[_Captured]:
        """Datums as far as `max_rows` go, the first one by the rotation."""
        candidates = [
            _Captured(batch.data[index], rows, meta)
            for (batch, indices), share_rows, meta in zip(
                shares, layout.rows, self._settings.metadata, strict=True
            )
            for index, rows in zip(indices, share_rows, strict=True)
            if len(rows) >= MIN_TOKENS and drafted_mask(batch.data[index]).any()
        ]
        first = self._settings.rotation % len(candidates) if candidates else 0
        selection, rows_left = [], self._settings.max_rows
        for candidate in candidates[first:] + candidates[:first]:
            if len(candidate.rows) <= rows_left:
                selection.append(candidate)
                rows_left -= len(candidate.rows)
        return selection


def drafted_mask(datum: Datum) -> NDArray[np.bool_]:
    """(N,): the tokens whose next one the policy writes; prompts are not drafted. A loss names them
    by what it weighs: any of these inputs other than 0."""
    mask = np.zeros(len(datum.tokens), np.bool_)
    for name in ("weights", "logprobs", "advantages"):
        if name in datum.inputs:
            values = datum.inputs[name]
            mask[: len(values)] |= (values.reshape(len(values), -1) != 0).any(1)
    return mask


def at_temperature(probs: Tensor, temperature: float) -> Tensor:
    """Distributions at temperature 1, (n, V), as they are at another one; 0 counts as 1."""
    if temperature in (0.0, 1.0):
        return probs
    return torch.softmax(probs.log() / temperature, -1)


# ---- by a pass of its own


@torch.no_grad()
def capture_sequence(
    version: Version,
    tokens: Tokens,
    layers: Sequence[int],
    num_prompt: int,
    meta: SequenceMetadata,
) -> CapturedSequence:
    """layers: as in HeadConfig."""
    ids = version.base.tensor(tokens.astype("int64"))
    context = frozen_context(version.weights, [len(tokens)], version.entry)
    outputs = layer_outputs(version, context, ids)
    hidden = torch.stack([outputs[layer - 1] for layer in layers], 1)
    logits = version.base.architecture.unembed(context, outputs[-1])
    return CapturedSequence.from_logits(ids, hidden, logits, num_prompt, meta)


def layer_outputs(version: Version, context: TrainContext, ids: Tensor) -> list[Tensor]:
    """(N, D) after each block; the last one after the final norm."""
    architecture = version.base.architecture
    cos, sin = architecture.rotary(torch.arange(len(ids), device=ids.device))
    x = context.embed(ids)
    outputs = []
    for index in range(version.base.config.num_layers):
        x = architecture.layer(context, index, x, cos, sin)
        outputs.append(x)
    outputs[-1] = architecture.final_norm(context, x)
    return outputs
