"""The targets of one pass in the order in which the unembedding computes them, and their losses.

A pair is a row and one of its targets; a datum's pairs are its target_tokens in C order. Datums
that share a row have pairs of their own there. Active rows come first (those whose weight or
advantage is not zero for some target), so that idle rows cost no backward pass.

Axes: T packed rows of the pass, P pairs of one share, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.core.types import Datum, TrainBatch
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.training.layout import Layout
from tinkercloud.errors import UserError
from tinkercloud.losses import LOSSES, load_loss, trained_input
from tinkercloud.losses.custom.evaluation import loss_and_gradient
from tinkercloud.losses.custom.graph import CUSTOM

PER_SEQUENCE = ("gspo", CUSTOM)
"""Losses over a whole datum: their gradient is known only when all its pairs are scored."""


@dataclass(slots=True)
class Targets:
    """One share's pairs.

    rows: int64 (P,), packed row of each pair, `order` applied. order: position of each pair among
    the datums' pairs. logprobs, losses: float32 (P,), filled by the pass, in the datums' order.
    """

    data: Sequence[Datum]
    batch: TrainBatch
    indices: Sequence[int]  # of the datums in their batch
    ids: Tensor
    inputs: Mapping[str, Tensor]
    order: Tensor
    logprobs: Tensor
    losses: Tensor
    gradient: Tensor = field(init=False)
    metrics: list[Mapping[str, float]] = field(default_factory=list)  # of a custom loss, by datum
    fault: UserError | None = None  # of a custom loss; those that share the pass go on

    @property
    def per_sequence(self) -> bool:
        return self.batch.loss_fn in PER_SEQUENCE

    def score(self, pairs: slice, logprobs: Tensor, *, with_gradient: bool) -> Tensor | None:
        """Record these ordered pairs' log-probabilities; returns d loss / d logprob, float32.

        A loss by sequence is scored at the end (`score_sequences`).
        """
        at = self.order[pairs]
        self.logprobs[at] = logprobs
        if self.per_sequence:
            return None
        inputs = {name: value[at] for name, value in self.inputs.items()}
        losses, gradient = self._loss(logprobs, inputs, with_gradient=with_gradient)
        self.losses[at] = losses
        return gradient

    def score_sequences(self, *, with_gradient: bool) -> None:
        """The losses of all datums, each by itself; `gradient` in the ordered pairs' order."""
        if self.batch.loss_fn == CUSTOM:
            self._score_custom(with_gradient=with_gradient)
            return
        counts = self.counts()
        inputs = {name: value.split(counts) for name, value in self.inputs.items()}
        gradients = []
        for i, logprobs in enumerate(self.logprobs.split(counts)):
            datum_inputs = {name: values[i] for name, values in inputs.items()}
            losses, gradient = self._loss(logprobs, datum_inputs, with_gradient=with_gradient)
            self.losses[sum(counts[:i]) : sum(counts[: i + 1])] = losses
            gradients.append(gradient)
        if with_gradient:
            self.gradient = torch.cat(gradients)[self.order]

    def _score_custom(self, *, with_gradient: bool) -> None:
        """A datum's loss is one number: it stands at the datum's first pair."""
        gradient, start = torch.zeros_like(self.logprobs), 0
        for datum in self.data:
            shape = datum.inputs["target_tokens"].shape
            pairs = slice(start, start := start + math.prod(shape))
            try:
                loss, slope, metrics = loss_and_gradient(
                    self.batch.custom_loss,
                    self.logprobs[pairs].reshape(shape),
                    datum.inputs,
                    with_gradient=with_gradient,
                )
            except UserError as error:
                self.fault = error
                break
            self.losses[pairs.start] = loss
            gradient[pairs] = slope.flatten()
            self.metrics.append(metrics)
        if with_gradient:
            self.gradient = gradient[self.order]

    def _loss(
        self, logprobs: Tensor, inputs: Mapping[str, Tensor], *, with_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(with_gradient):
            leaf = logprobs.detach().requires_grad_(with_gradient)
            losses = load_loss(self.batch.loss_fn)(leaf, inputs, self.batch.loss_fn_config)
            gradient = torch.zeros_like(leaf)
            if losses.requires_grad:
                (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach(), gradient

    def counts(self) -> list[int]:
        return [datum.inputs["target_tokens"].size for datum in self.data]

    def finish(self) -> tuple[float, list[dict[str, NDArray[np.float32]]]]:
        """The summed loss and every datum's outputs; UserError where a loss is not finite."""
        if self.fault is not None:
            raise self.fault
        ends = np.cumsum(self.counts())[:-1]
        logprobs = np.split(self.logprobs.cpu().numpy(), ends)
        losses = np.split(self.losses.cpu().numpy(), ends)
        total, outputs = 0.0, []
        for i, datum in enumerate(self.data):
            value = float(losses[i].sum(dtype=np.float64))
            if not np.isfinite(value):
                raise UserError(
                    f"the {self.batch.loss_fn} loss of datum {self.indices[i]} is {value}; "
                    "the gradient of this call was dropped. Check logprobs, advantages and weights"
                )
            total += value
            shape = datum.inputs["target_tokens"].shape
            output = {"logprobs": logprobs[i].reshape(shape)}
            if self.batch.loss_fn == "cross_entropy":
                output["elementwise_loss"] = losses[i].reshape(shape)
            if self.metrics:
                metrics = self.metrics[i].items()
                output |= {name: np.array([value], np.float32) for name, value in metrics}
            outputs.append(output)
        return total, outputs


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of the pass's order that belong to one share, all active or all not.

    share: which. rows: in the order of the pass. pairs: in the share's order.
    """

    share: int
    rows: slice
    pairs: slice


@dataclass(frozen=True, slots=True)
class Order:
    """The order of a pass's rows: rows int64 (T,) are packed rows, active ones first.

    pair_rows[share] int64 (P,): position in `rows` of each of its ordered pairs.
    """

    rows: NDArray[np.int64]
    num_active: int
    spans: tuple[Span, ...]
    pair_rows: tuple[NDArray[np.int64], ...]


@dataclass(frozen=True, slots=True)
class _Flat:
    """One share's pairs in the datums' order. rows: packed rows of the pass."""

    rows: NDArray[np.int64]
    ids: NDArray[np.int64]
    inputs: dict[str, NDArray[np.float32]]
    active: NDArray[np.bool_]  # by row of the share


def _flatten(
    batch: TrainBatch,
    data: Sequence[Datum],
    rows_of: Sequence[NDArray[np.int64]],
    span: tuple[int, int],
) -> _Flat:
    """data: of the batch, those of the pass. rows_of: of each. span: the share's rows."""
    custom = batch.loss_fn == CUSTOM  # its inputs keep their shapes, and stay with the datum
    names = () if custom else LOSSES[batch.loss_fn].inputs
    rows = []
    for datum, datum_rows in zip(data, rows_of, strict=True):
        targets = datum.inputs["target_tokens"]
        per_row = targets.shape[1] if targets.ndim == 2 else 1
        rows.append(np.repeat(datum_rows[: len(targets)], per_row))
    flat_rows = np.concatenate(rows)
    inputs = {
        name: np.concatenate([np.asarray(d.inputs[name], np.float32).ravel() for d in data])
        for name in names
    }
    active = np.zeros(span[1] - span[0], np.bool_)
    if custom:
        active[flat_rows - span[0]] = True  # which have a gradient, the loss alone knows
    else:
        deciding = trained_input(batch.loss_fn, batch.loss_fn_config)
        active[flat_rows[inputs[deciding] != 0] - span[0]] = True
    ids = np.concatenate([d.inputs["target_tokens"].ravel() for d in data]).astype(np.int64)
    return _Flat(flat_rows, ids, inputs, active)


def arrange(
    base: BaseModel, shares: Sequence[tuple[TrainBatch, Sequence[int]]], layout: Layout
) -> tuple[list[Targets], Order]:
    """shares: batches and the indices of their datums in this pass, in the layout's order."""
    flats = []
    for i, (batch, indices) in enumerate(shares):
        data = [batch.data[index] for index in indices]
        flats.append(_flatten(batch, data, layout.rows[i], layout.span(i)))
    idle = np.concatenate([~flat.active for flat in flats])
    # Stable: active and idle rows each keep the packing's order, and so the shares'.
    rows = np.argsort(idle, kind="stable")
    place = np.empty_like(rows)
    place[rows] = np.arange(len(rows))
    orders = [np.argsort(place[flat.rows], kind="stable") for flat in flats]
    pair_rows = tuple(place[f.rows][o] for f, o in zip(flats, orders, strict=True))
    order = Order(rows, int((~idle).sum()), tuple(_spans(flats, pair_rows)), pair_rows)
    targets = []
    for (batch, indices), flat, pairs in zip(shares, flats, orders, strict=True):
        targets.append(_targets(base, batch, indices, flat, pairs))
    return targets, order


def _targets(
    base: BaseModel,
    batch: TrainBatch,
    indices: Sequence[int],
    flat: _Flat,
    order: NDArray[np.int64],
) -> Targets:
    num = len(flat.ids)
    return Targets(
        data=[batch.data[i] for i in indices],
        batch=batch,
        indices=indices,
        ids=base.tensor(flat.ids[order]),
        inputs={name: base.tensor(value) for name, value in flat.inputs.items()},
        order=base.tensor(order),
        logprobs=torch.zeros(num, device=base.device),
        losses=torch.zeros(num, device=base.device),
    )


def _spans(flats: Sequence[_Flat], pair_rows: Sequence[NDArray[np.int64]]) -> list[Span]:
    spans, row = [], 0
    for active in (True, False):
        for share, flat in enumerate(flats):
            num = int((flat.active == active).sum())
            if num:
                pairs = np.searchsorted(pair_rows[share], (row, row + num))
                spans.append(Span(share, slice(row, row + num), slice(*map(int, pairs))))
            row += num
    return spans
