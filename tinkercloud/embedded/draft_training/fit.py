"""A draft's optimizer steps: warm-up and cosine, accumulated gradients, within a budget of time."""

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
BatchIn = TypeVar("BatchIn", contravariant=True)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """per_row: for every place where a draft may begin, how many of its tokens are expected to
    stand. by_depth: expected acceptance of the first, second, ... token."""

    per_row: NDArray[np.float64]
    by_depth: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(self.per_row.mean()) if len(self.per_row) else 0.0

    def as_json(self) -> dict[str, Any]:
        """As the notes of a draft have it."""
        return {"mean": self.mean, "by_depth": list(self.by_depth)}


class Trainer(Protocol[BatchIn]):
    """A draft that learns. params: its trained tensors by name, float32 leaves, its own alone."""

    @property
    def params(self) -> dict[str, Tensor]: ...

    def loss(self, batch: BatchIn) -> Tensor:
        """One number, differentiable in `params` and in nothing else."""
        ...

    def evaluate(self, batch: BatchIn) -> Evaluation:
        """Rows in the order of the batch, the same ones whatever the parameters are."""
        ...

    def write(self, params: Mapping[str, Tensor], directory: Path) -> None: ...

    def read(self, directory: Path) -> dict[str, Tensor]:
        """What `write` wrote. Raises UserError when it does not fit this draft."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """Rates of learning rise linearly over `warmup_steps`, then fall along a cosine to
    `least_share` of the peak. accumulate: batches whose gradients make one step."""

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
        left = max(self.num_steps - self.warmup_steps, 1)
        wave = 0.5 * (1 + math.cos(math.pi * min((step - self.warmup_steps) / left, 1.0)))
        return self.peak_rate * (self.least_share + (1 - self.least_share) * wave)


@dataclass(slots=True)
class Fit(Generic[Batch]):
    """One training of one trainer, in pieces. next_batch: the batch of that number."""

    trainer: Trainer[Batch]
    next_batch: Callable[[int], Batch]
    plan: Plan
    losses: list[float] = field(default_factory=list)
    _optimizer: AdamW = field(init=False)

    def __post_init__(self) -> None:
        self._optimizer = AdamW({n: p.detach() for n, p in self.trainer.params.items()})

    @property
    def done(self) -> bool:
        return len(self.losses) >= self.plan.num_steps

    def advance(self, budget: TimeBudget, most_steps: int | None = None) -> None:
        """Steps until the plan is done, the time is used up, or so many are made."""
        last = len(self.losses) + (most_steps or self.plan.num_steps)
        while not self.done and budget.left_s > 0 and len(self.losses) < last:
            with budget.spending():
                self.losses.append(self._step(len(self.losses)))

    def _step(self, number: int) -> float:
        count = self.plan.accumulate
        grads: dict[str, Tensor] = {}
        total = 0.0
        for i in range(count):
            loss, new = gradients(self.trainer, self.next_batch(number * count + i))
            total += loss / count
            for name, grad in new.items():
                grads[name] = grads[name] + grad / count if name in grads else grad / count
        self._optimizer.step(grads, self._hyper(number))
        return total

    def _hyper(self, number: int) -> AdamParams:
        return AdamParams(
            learning_rate=self.plan.rate(number),
            grad_clip_norm=self.plan.grad_clip_norm,
            weight_decay=self.plan.weight_decay,
        )


def gradients(trainer: Trainer[Batch], batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """The loss and its gradient in the trainer's parameters; no other tensor gets one."""
    names = list(trainer.params)
    with torch.enable_grad():
        loss = trainer.loss(batch)
        grads = torch.autograd.grad(loss, [trainer.params[n] for n in names], allow_unused=True)
    found = {n: g for n, g in zip(names, grads, strict=True) if g is not None}
    return float(loss.detach()), found


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
