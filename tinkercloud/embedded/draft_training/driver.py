"""A draft that follows the policy: when it is trained, on what, and whether the result is used.

The draft that is served never changes under whoever reads it: training works on the trainer's own
tensors, and a promotion replaces the served ones in one go.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from tinkercloud.embedded.draft_training.fit import (
    Evaluation,
    Fit,
    Plan,
    Trainer,
    assign,
    copied,
    joined,
)
from tinkercloud.errors import UserError
from tinkercloud.speculative.learning.draft_folder import DraftFolder
from tinkercloud.speculative.learning.schedule import TimeBudget, Trigger, TriggerSettings

Batch = TypeVar("Batch")
BatchOut = TypeVar("BatchOut", covariant=True)


class Dataset(Protocol[BatchOut]):
    """What there is to learn from."""

    def batch(self, number: int) -> BatchOut:
        """The batch of that number: the same one for the same number and content."""
        ...

    def held_out(self) -> Sequence[BatchOut]:
        """Of the current policy, never in a batch. Empty while there is too little of it."""
        ...


@dataclass(frozen=True, slots=True)
class Gate:
    """A draft is used when it is expected to have more tokens stand, by more than `margin` of a
    token for each draft, on at least `least_rows` places held out."""

    margin: float = 0.0
    least_rows: int = 16

    def opens(self, before: Evaluation, after: Evaluation) -> bool:
        """The two are of the same rows."""
        if len(after.per_row) < self.least_rows:
            return False
        return float((after.per_row - before.per_row).mean()) > self.margin


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    plan: Plan = field(default_factory=Plan)
    trigger: TriggerSettings = field(default_factory=TriggerSettings)
    gate: Gate = field(default_factory=Gate)


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Of one training. version: the folder it was written to."""

    reason: str
    before: Evaluation
    after: Evaluation
    promoted: bool
    version: str
    losses: tuple[float, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "reason": self.reason,
            "before": self.before.as_json(),
            "after": self.after.as_json(),
            "promoted": self.promoted,
            "num_steps": len(self.losses),
            "first_loss": self.losses[0] if self.losses else None,
            "last_loss": self.losses[-1] if self.losses else None,
        }


@dataclass(slots=True)
class _Running(Generic[Batch]):
    reason: str
    step: int
    fit: Fit[Batch]


class TrainingDriver(Generic[Batch]):
    """Owned by one thread, which calls `work` when it has nothing better to do."""

    def __init__(
        self,
        trainer: Trainer[Batch],
        dataset: Dataset[Batch],
        folder: DraftFolder,
        budget: TimeBudget,
        training: TrainingSettings,
    ):
        self._trainer, self._dataset, self._folder = trainer, dataset, folder
        self._training = training
        self._running: _Running[Batch] | None = None
        self._step = 0
        self.budget = budget
        self.trigger = Trigger(training.trigger)
        self.served: Mapping[str, Tensor] = copied(trainer.params)

    def policy_stepped(self, step: int, took_s: float, acceptance: float | None = None) -> None:
        """The policy has made its step `step` in `took_s` seconds; acceptance: of the drafted
        tokens during it, None where none were drafted."""
        self._step = step
        self.budget.step_took(took_s)
        if acceptance is not None:
            self.trigger.observe(acceptance)

    @property
    def is_due(self) -> bool:
        """Whether `work` would do something."""
        if self.budget.left_s <= 0:
            return False
        if self._running is not None:
            return True
        return self.trigger.due(self._step) is not None and bool(self._dataset.held_out())

    def work(
        self, reason: str | None = None, most_steps: int | None = None
    ) -> TrainingResult | None:
        """Train as far as there is time, or so many steps; the result once a training is done.
        `reason`: train whether or not it is due. Raises UserError when a training breaks off."""
        if self._running is None:
            self._begin(reason or self.trigger.due(self._step))
        running = self._running
        if running is None:
            return None
        try:
            running.fit.advance(self.budget, most_steps)
        except UserError:  # a gradient that is not finite: what is served stays as it is
            self._running = None
            raise
        return self._conclude(running) if running.fit.done else None

    def finish(self) -> TrainingResult | None:
        """What is underway ends as far as it has come; None where nothing is."""
        return self._conclude(self._running) if self._running is not None else None

    def rollback(self) -> str:
        """Draft again with what was used before; its version. Raises NotFound without one."""
        return self.use(self._folder.rollback("best"))

    def use(self, name: str) -> str:
        """Draft with a version or an alias of the folder. Raises NotFound and UserError."""
        version = self._folder.resolve(name)
        self.served = self._trainer.read(self._folder.path(version))
        self._folder.use("best", version)
        self._running = None  # it began from another draft
        return version

    def publish(self, notes: Mapping[str, Any]) -> str:
        """What is served becomes a version and the best one: where everything begins."""
        version = self._write(self.served, notes)
        self._folder.use("best", version)
        return version

    def _begin(self, reason: str | None) -> None:
        if reason is None or self.budget.left_s <= 0 or not self._dataset.held_out():
            return
        assign(self._trainer, self.served)
        fit = Fit(self._trainer, self._dataset.batch, self._training.plan)
        self._running = _Running(reason, self._step, fit)

    def _conclude(self, running: _Running[Batch]) -> TrainingResult:
        """Both drafts on what is held out now: the policy may have moved since the beginning."""
        self._running = None
        trained = copied(self._trainer.params)
        with self.budget.spending():
            after = self._evaluated(trained)
            before = self._evaluated(self.served)
        promoted = self._training.gate.opens(before, after)
        losses = tuple(running.fit.losses)
        result = TrainingResult(running.reason, before, after, promoted, "", losses)
        version = self._write(trained, result.as_json())
        if promoted:
            self.served = trained
            self._folder.use("best", version)
        self.trigger.updated(self._step)
        return TrainingResult(running.reason, before, after, promoted, version, losses)

    def _evaluated(self, params: Mapping[str, Tensor]) -> Evaluation:
        assign(self._trainer, params)
        return joined([self._trainer.evaluate(batch) for batch in self._dataset.held_out()])

    def _write(self, params: Mapping[str, Tensor], notes: Mapping[str, Any]) -> str:
        return self._folder.publish(lambda path: self._trainer.write(params, path), notes)
