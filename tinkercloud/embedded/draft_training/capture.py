"""What a draft head learns from, taken from the policy's own training passes: the hidden states and
the laws are computed there anyway, so that the target runs for no draft's sake.

Axes: T packed rows of a pass, R captured ones, N tokens of a datum, L fused layers, D hidden,
V vocabulary, M most probable tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.core.types import Datum
from tinkercloud.embedded.draft_training.head_trainer import CapturedSequence, SequenceMetadata
from tinkercloud.embedded.training.layout import Layout
from tinkercloud.embedded.training.observer import Datums
from tinkercloud.speculative.head.losses import Teacher, most_probable
from tinkercloud.speculative.learning.schedule import TimeBudget

LEAST_TOKENS = 4  # of a datum worth learning from


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """layers: as in HeadConfig. most_rows: of one pass. turn: another one takes other datums.
    told: of each share's sequences; its num_prompt is not read."""

    layers: tuple[int, ...]
    most_rows: int
    turn: int
    told: Sequence[SequenceMetadata]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """rows (N,) of the pass."""

    datum: Datum
    rows: NDArray[np.int64]
    told: SequenceMetadata


class PassCapture:
    """The observer of one pass. took: is given every sequence. budget: its time is a draft's."""

    def __init__(
        self, capture: CaptureSettings, took: Callable[[CapturedSequence], None], budget: TimeBudget
    ):
        self._capture, self._took, self._budget = capture, took, budget
        self._chosen: list[_Chosen] = []
        self._rows = torch.empty(0, dtype=torch.int64)  # (R,) of the pass
        self._place = torch.empty(0, dtype=torch.int64)  # (T,): of each row among these, or -1
        self._hidden: dict[int, Tensor] = {}
        self._ids = self._probs = torch.empty(0)

    def begin(self, shares: Sequence[Datums], layout: Layout) -> None:
        with self._budget.spending():
            self._chosen = self._choice(shares, layout)
            rows = [one.rows for one in self._chosen]
            wanted = np.unique(np.concatenate(rows)) if rows else np.zeros(0, np.int64)
            place = np.full(len(layout.tokens), -1, np.int64)
            place[wanted] = np.arange(len(wanted))
            self._rows, self._place = torch.from_numpy(wanted), torch.from_numpy(place)
            count = self._capture.told[0].count
            self._ids = torch.zeros(len(wanted), count, dtype=torch.int64)
            self._probs = torch.zeros(len(wanted), count)

    def block(self, number: int, x: Tensor) -> None:
        if self._chosen and number in self._capture.layers:
            with self._budget.spending():
                self._hidden[number] = x[self._rows.to(x.device)].float().cpu()

    def distributions(self, rows: Tensor, probs: Tensor) -> None:
        with self._budget.spending():
            place = self._place[rows.cpu()]
            taken = place >= 0
            if not taken.any():
                return
            law = at_temperature(probs[taken.to(probs.device)], self._capture.told[0].temperature)
            teacher = most_probable(law, self._ids.shape[1])
            assert teacher.ids is not None
            told = teacher.ids.shape[1]
            self._ids[place[taken], :told] = teacher.ids.cpu()
            self._probs[place[taken], :told] = teacher.probs.cpu()

    def end(self) -> None:
        with self._budget.spending():
            if not self._chosen:
                return
            hidden = torch.stack([self._hidden[layer] for layer in self._capture.layers], 1)
            for one in self._chosen:
                self._took(self._sequence(one, hidden))

    def _sequence(self, one: _Chosen, hidden: Tensor) -> CapturedSequence:
        place = self._place[torch.from_numpy(one.rows)]
        probs = self._probs[place]
        teacher = Teacher(probs, self._ids[place], 1.0 - probs.sum(-1))
        weights = counted(one.datum).astype(np.float32)
        return CapturedSequence.taught(one.datum.tokens, hidden[place], teacher, weights, one.told)

    def _choice(self, shares: Sequence[Datums], layout: Layout) -> list[_Chosen]:
        """Datums as far as the rows go, beginning with another one at each turn."""
        found = [
            _Chosen(batch.data[index], rows, told)
            for (batch, indices), of_share, told in zip(
                shares, layout.rows, self._capture.told, strict=True
            )
            for index, rows in zip(indices, of_share, strict=True)
            if len(rows) >= LEAST_TOKENS and counted(batch.data[index]).any()
        ]
        first = self._capture.turn % len(found) if found else 0
        chosen, left = [], self._capture.most_rows
        for one in found[first:] + found[:first]:
            if len(one.rows) <= left:
                chosen.append(one)
                left -= len(one.rows)
        return chosen


def counted(datum: Datum) -> NDArray[np.bool_]:
    """(N,): the tokens whose next one the policy wrote, or is taught; prompts are not drafted."""
    inputs = datum.inputs
    deciding = [inputs[n] for n in ("weights", "logprobs", "advantages") if n in inputs]
    told = np.zeros(len(datum.tokens), np.bool_)
    for values in deciding:
        by_token = values.reshape(len(values), -1) != 0
        told[: len(values)] |= by_token.any(1)
    return told


def at_temperature(probs: Tensor, temperature: float) -> Tensor:
    """A law at temperature 1, (n, V), as it is at another one; 0 counts as 1."""
    if temperature in (0.0, 1.0):
        return probs
    return torch.softmax(probs.log() / temperature, -1)
