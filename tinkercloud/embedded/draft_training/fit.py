"""The optimizer steps of a draft's training, in parts, and what was trained beside what is served:
as their driver (`driver`) has time for them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.core.types import AdamParams
from tinkercloud.embedded.training.optimizer import AdamW
from tinkercloud.speculative.learning.schedule import TimeBudget

Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """per_row: for every place where a draft may begin, how many of its tokens are expected to be
    accepted. by_depth: expected acceptance of the first, second, ... token."""

    per_row: NDArray[np.float64]
    by_depth: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(self.per_row.mean()) if len(self.per_row) else 0.0

    def as_json(self) -> dict[str, Any]:
        return {"mean": self.mean, "by_depth": list(self.by_depth)}


class Trainer(Protocol[Batch]):
    """A draft in training. params: its trained tensors by name, float32 leaves, shared with
    nobody."""

    @property
    def params(self) -> dict[str, Tensor]: ...

    def loss(self, batch: Batch) -> Tensor:
        """One number, differentiable in `params` and in nothing else."""
        ...

    def parts(self, batch: Batch) -> Sequence[tuple[Batch, float]]:
        """A batch in small pieces, each with its share: the sum of their losses times these is
        `loss(batch)`."""
        ...

    def evaluate(self, batch: Batch) -> Evaluation:
        """Rows in the order of the batch, the same ones whatever the parameters are."""
        ...

    def write(self, params: Mapping[str, Tensor], directory: Path) -> None: ...

    def read(self, directory: Path) -> dict[str, Tensor]:
        """What `write` wrote. Raises UserError when it does not fit this draft."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """The learning rate rises linearly over `warmup_steps`, then falls along a cosine to
    `least_share` of its peak. accumulate: batches whose gradients make one step."""

    num_steps: int = 50
    peak_rate: float = 1e-3
    warmup_steps: int = 5
    least_share: float = 0.1
    accumulate: int = 1
    grad_clip_norm: float = 1.0
    weight_decay: float = 0.0

    def rate(self, step: int) -> float:
        """Of the step numbered from 0."""
        if step < self.warmup_steps:
            return self.peak_rate * (step + 1) / self.warmup_steps
        decay_steps = max(self.num_steps - self.warmup_steps, 1)
        wave = 0.5 * (1 + math.cos(math.pi * min((step - self.warmup_steps) / decay_steps, 1.0)))
        return self.peak_rate * (self.least_share + (1 - self.least_share) * wave)


@dataclass(slots=True)
class Fit(Generic[Batch]):
    """The optimizer steps of one training. next_batch: the batch of that number."""

    trainer: Trainer[Batch]
    next_batch: Callable[[int], Batch]
    plan: Plan
    reason: str = ""
    losses: list[float] = field(default_factory=list)
    _optimizer: AdamW = field(init=False)
    _parts: list[tuple[Batch, float]] = field(init=False, default_factory=list)
    """Of the step underway, those to come, each with its share of the step."""
    _grads: dict[str, Tensor] = field(init=False, default_factory=dict[str, Tensor])
    _loss: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._optimizer = AdamW({n: p.detach() for n, p in self.trainer.params.items()})

    @property
    def done(self) -> bool:
        return len(self.losses) >= self.plan.num_steps

    def advance(self, budget: TimeBudget, *, in_parts: bool = False, quiet: bool = False) -> None:
        """Steps until the plan is done or the time is used up. in_parts: one part of one."""
        while not self.done and (quiet or budget.left_s > 0):
            with budget.spending(quiet=quiet):
                if not self._parts:
                    self._begin_step(in_parts=in_parts)
                self._advance()
                while self._parts and not in_parts:
                    self._advance()
            if in_parts:
                return

    def _begin_step(self, *, in_parts: bool) -> None:
        self._grads, self._loss = {}, 0.0
        first, many = len(self.losses) * self.plan.accumulate, self.plan.accumulate
        for batch in map(self.next_batch, range(first, first + many)):
            parts = self.trainer.parts(batch) if in_parts else ((batch, 1.0),)
            self._parts += [(part, share / many) for part, share in parts]

    def _advance(self) -> None:
        """A part of a step."""
        plan = self.plan
        part, share = self._parts.pop(0)
        loss, grads = gradients(self.trainer, part)
        self._loss += share * loss
        for name, grad in grads.items():
            before = self._grads.get(name)
            self._grads[name] = share * grad if before is None else before + share * grad
        if self._parts:
            return
        hyper = AdamParams(
            learning_rate=plan.rate(len(self.losses)),
            grad_clip_norm=plan.grad_clip_norm,
            weight_decay=plan.weight_decay,
        )
        self._optimizer.step(self._grads, hyper)
        self.losses.append(self._loss)


@dataclass(slots=True)
class Trial(Generic[Batch]):
    """What was trained beside what is served, on the same rows. Both now, not `served` when the
    training began: the policy may have moved in between."""

    trainer: Trainer[Batch]
    trained: Mapping[str, Tensor]
    served: Mapping[str, Tensor]
    held_out: Sequence[Batch]
    after: list[Evaluation] = field(default_factory=list)
    before: list[Evaluation] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.before) == len(self.held_out)

    def advance(self) -> None:
        """One batch, by one of the two."""
        is_first = len(self.after) < len(self.held_out)
        found = self.after if is_first else self.before
        if not found:
            assign(self.trainer, self.trained if is_first else self.served)
        found.append(self.trainer.evaluate(self.held_out[len(found)]))


def gradients(trainer: Trainer[Batch], batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """The loss and its gradient in the trainer's parameters; no other tensor gets one."""
    names = list(trainer.params)
    with torch.enable_grad():
        loss = trainer.loss(batch)
        grads = torch.autograd.grad(loss, [trainer.params[n] for n in names], allow_unused=True)
    return float(loss.detach()), {n: g for n, g in zip(names, grads, strict=True) if g is not None}


def copied(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in params.items()}


def assign(trainer: Trainer[Any], params: Mapping[str, Tensor]) -> None:
    """The trainer goes on from these values."""
    with torch.no_grad():
        for name, tensor in trainer.params.items():
            tensor.copy_(params[name])


def joined(parts: Sequence[Evaluation]) -> Evaluation:
    """Of several batches, depths weighing by their rows."""
    if not parts:
        return Evaluation(np.zeros(0), ())
    sizes = [len(part.per_row) for part in parts]
    depths = np.average([part.by_depth for part in parts], axis=0, weights=np.maximum(sizes, 1e-9))
    rows = np.concatenate([part.per_row for part in parts])
    return Evaluation(rows, tuple(float(d) for d in depths))
