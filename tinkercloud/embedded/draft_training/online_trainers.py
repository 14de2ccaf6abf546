"""The online trainers of all base models; spare time goes to the first that has work."""

from collections.abc import Sequence
from typing import Any

from tinkercloud.embedded.draft_training.capture import PassCapture
from tinkercloud.embedded.draft_training.online_trainer import OnlineTrainer
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.errors import UserError
from tinkercloud.speculative.observability.prometheus import following_lines


class OnlineTrainers:
    """Of all base models that an engine samples."""

    def __init__(self) -> None:
        self._trainers: dict[int, OnlineTrainer] = {}
        self._names: dict[int, str] = {}

    def add(self, base: BaseModel, trainer: OnlineTrainer) -> None:
        self._trainers[id(base)], self._names[id(base)] = trainer, base.name

    def observer(self, base: BaseModel, model_ids: Sequence[str]) -> PassCapture | None:
        trainer = self._trainers.get(id(base))
        return trainer.observer(model_ids) if trainer is not None else None

    def stepped(self, base: BaseModel, took_s: float) -> None:
        if id(base) in self._trainers:
            self._trainers[id(base)].stepped(took_s)

    def are_due(self, *, samples_wait: bool) -> bool:
        """Whether a training should run now, between slices of the policy's; or although samples
        wait, where these leave no other time."""
        trainers = self._trainers.values()
        return any(trainer.is_overdue if samples_wait else trainer.is_due for trainer in trainers)

    @property
    def are_due_in_quiet(self) -> bool:
        """Whether there is something to do in time that nobody else wants."""
        return any(trainer.is_due_in_quiet for trainer in self._trainers.values())

    def work(self, *, quiet: bool = False) -> None:
        for trainer in self._trainers.values():
            if trainer.is_due_in_quiet if quiet else trainer.is_due:
                trainer.work(quiet=quiet)
                return

    def poll(self, now_s: float, *, idle: bool) -> None:
        for trainer in self._trainers.values():
            trainer.poll(now_s, idle=idle)

    def ask(self, base_model: str) -> None:
        """For a training of that model's draft. Raises UserError."""
        for key, name in self._names.items():
            if name == base_model:
                self._trainers[key].ask()
                return
        raise UserError(
            f"no draft of {base_model} learns: see `--speculate`; or nothing was sampled yet"
        )

    def lines(self) -> list[str]:
        """Of the first one, as with the counters of speculation, in Prometheus' text format."""
        return next((following_lines(t.snapshot()) for t in self._trainers.values()), [])

    def snapshot(self) -> dict[str, dict[str, Any]]:
        return {self._names[key]: trainer.snapshot() for key, trainer in self._trainers.items()}
