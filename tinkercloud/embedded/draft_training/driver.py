"""The training of a draft: its optimizer steps within a budget of time, the gate that decides
whether the result is used, and its versions on disk. Online training, distillation and finetuning
all go through here.

The served draft never changes under whoever reads it: training works on the trainer's own tensors,
and a promotion replaces the served ones at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from tinkercloud.embedded.draft_training.fit import (
    Batch,
    Evaluation,
    Fit,
    Plan,
    Trainer,
    Trial,
    assign,
    copied,
    joined,
)
from tinkercloud.errors import UserError
from tinkercloud.speculative.learning.draft_folder import DraftFolder
from tinkercloud.speculative.learning.schedule import TimeBudget, Trigger, TriggerSettings

NEW_RATE = 3.0  # times the rate of a draft that has learned already
BatchOut = TypeVar("BatchOut", covariant=True)


class Dataset(Protocol[BatchOut]):
    def batch(self, number: int) -> BatchOut:
        """The batch of that number: the same one for the same number and content."""
        ...

    def held_out(self) -> Sequence[BatchOut]:
        """Of the current policy, never in a batch. Empty while there is too little of it."""
        ...


@dataclass(frozen=True, slots=True)
class Gate:
    """A draft is used when it is expected to have more tokens accepted, by more than `margin` of a
    token for each draft, on at least `least_rows` held-out places."""

    margin: float = 0.0
    least_rows: int = 16

    def opens(self, before: Evaluation, after: Evaluation) -> bool:
        """The two are of the same rows."""
        if len(after.per_row) < self.least_rows:
            return False
        return float((after.per_row - before.per_row).mean()) > self.margin


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """gate: None lets every draft pass. notes: are written down with every trained version."""

    plan: Plan = field(default_factory=Plan)
    trigger: TriggerSettings = field(default_factory=TriggerSettings)
    gate: Gate | None = field(default_factory=Gate)
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """before, after: the served draft and the trained one, on what is held out at the end.
    version: the folder that the trained one was written to."""

    reason: str
    before: Evaluation
    after: Evaluation
    promoted: bool
    losses: tuple[float, ...]
    version: str = ""

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


# Of the policy without a training of the draft, after which that is done although samples wait. A
# training between two steps, as quiet time mostly allows, is early enough for drafts to follow.
OVERDUE_STEPS = 3


class TrainingDriver(Generic[Batch]):
    """Owned by one thread, which calls `work` when it has nothing better to do."""

    def __init__(
        self,
        trainer: Trainer[Batch],
        dataset: Dataset[Batch],
        folder: DraftFolder,
        budget: TimeBudget,
        settings: TrainingSettings,
    ):
        self._trainer, self._dataset, self._folder = trainer, dataset, folder
        self._settings = settings
        self._fit: Fit[Batch] | None = None
        self._trial: Trial[Batch] | None = None  # once that is done
        self._step = 0
        self.budget = budget
        self.trigger = Trigger(settings.trigger)
        self.served: Mapping[str, Tensor] = copied(trainer.params)

    def policy_stepped(self, step: int, took_s: float, acceptance: float | None = None) -> None:
        """The policy has made its step `step` in `took_s` seconds; acceptance: of the drafted
        tokens during it, None where none were drafted."""
        self._step = step
        self.budget.step_took(took_s)
        if acceptance is not None:
            self.trigger.observe(acceptance)

    def is_due(self, *, quiet: bool = False) -> bool:
        """Whether `work` would do something; in `quiet` time whatever it takes."""
        if self.budget.left_s <= 0 and not quiet:
            return False
        if self._fit is not None:
            return True
        return self.trigger.due(self._step) is not None and self.can_learn

    @property
    def is_overdue(self) -> bool:
        """Due, with much of the budget unspent, and the last training ended some steps ago: quiet
        time does not suffice."""
        waited = self.trigger.steps_since_update(self._step)
        return self.budget.is_overdue and waited >= OVERDUE_STEPS and self.is_due()

    @property
    def can_learn(self) -> bool:
        """Whether there is something to train on, and to judge that by."""
        return bool(self._dataset.held_out())

    @property
    def reason(self) -> str | None:
        """Why a training is due, if one is: not one that is underway."""
        return None if self._fit is not None else self.trigger.due(self._step)

    @property
    def num_steps(self) -> int:
        """Of a training that is not cut short."""
        return self._settings.plan.num_steps

    @property
    def losses(self) -> Sequence[float]:
        """Of the training underway, by step."""
        return self._fit.losses if self._fit is not None else ()

    def work(
        self, reason: str | None = None, *, in_parts: bool = False, quiet: bool = False
    ) -> TrainingResult | None:
        """Train within the budget; the result once a training is done. in_parts: only a small part
        of it, as somebody may want to be served next. `reason`: train whether or not it is due.
        quiet: whatever the budget has left. Raises UserError when a training breaks off."""
        if self._fit is None:
            self._begin(reason or self.trigger.due(self._step), quiet=quiet)
        if self._fit is None:
            return None
        try:
            if not self._fit.done:
                self._fit.advance(self.budget, in_parts=in_parts, quiet=quiet)
                if in_parts or not self._fit.done:
                    return None
        except UserError:  # a gradient that is not finite: the served draft stays as it is
            self._fit = None
            self.trigger.updated(self._step, better=False)
            raise
        return self._judge(self._fit, in_parts=in_parts, quiet=quiet)

    def finish(self) -> TrainingResult | None:
        """Ends the training underway with the steps made so far; None where there is none."""
        return self._judge(self._fit) if self._fit is not None else None

    def _judge(
        self, fit: Fit[Batch], *, in_parts: bool = False, quiet: bool = False
    ) -> TrainingResult | None:
        """Whether what was trained is used; None until that is known."""
        if self._trial is None:
            held_out = tuple(self._dataset.held_out())
            self._trial = Trial(self._trainer, copied(self._trainer.params), self.served, held_out)
        trial = self._trial
        if not trial.done:
            with self.budget.spending(quiet=quiet):
                trial.advance()
                while not (trial.done or in_parts):
                    trial.advance()
            if in_parts:
                return None
        self._fit = self._trial = None
        before, after, gate = joined(trial.before), joined(trial.after), self._settings.gate
        promoted = gate is None or gate.opens(before, after)
        result = TrainingResult(fit.reason, before, after, promoted, tuple(fit.losses))
        version = self._write(trial.trained, {**self._settings.notes, **result.as_json()})
        if promoted:
            self.served = trial.trained
            self._folder.use("best", version)
        self.trigger.updated(self._step, better=promoted)
        return replace(result, version=version)

    def use(self, name: str) -> str:
        """Draft with a version or an alias of the folder. Raises NotFound and UserError."""
        version = self._folder.resolve(name)
        self.served = self._trainer.read(self._folder.path(version))
        self._folder.use("best", version)
        self._fit = self._trial = None  # it began from another draft
        return version

    def publish(self, notes: Mapping[str, Any]) -> str:
        """The served draft becomes a version and the best one: where everything begins."""
        version = self._write(self.served, notes)
        self._folder.use("best", version)
        return version

    def _begin(self, reason: str | None, *, quiet: bool) -> None:
        if reason is None or not (quiet or self.budget.left_s > 0):
            return
        if not self.can_learn:
            return
        assign(self._trainer, self.served)
        self._fit = Fit(self._trainer, self._dataset.batch, self._settings.plan, reason)

    def _write(self, params: Mapping[str, Tensor], notes: Mapping[str, Any]) -> str:
        return self._folder.publish(lambda path: self._trainer.write(params, path), notes)
