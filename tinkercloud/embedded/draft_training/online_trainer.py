"""Training of drafts while a server samples and trains, so that they keep up with the policy.

Heads learn from hidden states and distributions of the policy's own training passes (`capture`),
draft models from disagreements in rollouts (`speculative.learning.collecting`). A draft is trained
when the policy has made a step or acceptance has fallen, one step at a time, within a share of the
time of the policy's own steps; the next round uses it if it passes the gate.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from torch import Tensor

from tinkercloud.embedded.draft_training.capture import (
    CapturedSequence,
    CaptureSettings,
    PassCapture,
    SequenceMetadata,
)
from tinkercloud.embedded.draft_training.driver import (
    Dataset,
    Plan,
    Trainer,
    TrainingDriver,
    TrainingResult,
    TrainingSettings,
)
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.errors import NotFound, UserError
from tinkercloud.speculative.drafters.drafter import Stream
from tinkercloud.speculative.learning.cases import CaseStore
from tinkercloud.speculative.learning.collecting import CaseCollector, JudgedToken
from tinkercloud.speculative.learning.draft_folder import DraftFolder
from tinkercloud.speculative.learning.schedule import TimeBudget
from tinkercloud.speculative.observability.acceptance_log import AcceptanceLog

logger = logging.getLogger(__name__)

CASES = "cases.jsonl"
LINE_S = 60.0  # between two lines of the acceptance log where the policy makes no step
WRITE_S = 30.0  # between two writes of the cases while the engine is idle


@dataclass(frozen=True, slots=True)
class OnlineSettings:
    """share: of the time of the policy's steps, 0 for no training. memory_bytes: of sequences and
    cases; max_age: versions after which they are dropped. pass_rows: captured in one training
    pass."""

    share: float = 0.1
    memory_bytes: int = 256 * 1024**2
    max_age: int = 16
    pass_rows: int = 512
    case_share: float = 1 / 16  # of the memory
    training: TrainingSettings = field(
        default_factory=lambda: TrainingSettings(
            plan=Plan(num_steps=24, peak_rate=3e-4, warmup_steps=3)
        )
    )


@dataclass(frozen=True, slots=True)
class DraftTrainee:
    """A draft that is trained online. use: draft with these parameters from the next round on.
    layers: of the target, whose hidden states `add` takes; () where cases are enough."""

    trainer: Trainer[Any]
    dataset: Dataset[Any]
    use: Callable[[Mapping[str, Tensor]], None]
    layers: tuple[int, ...] = ()
    add: Callable[[CapturedSequence], None] = lambda sequence: None


class Renewable(Protocol):
    def renew(self) -> None:
        """Another draft, or another policy."""
        ...


P = ParamSpec("P")
R = TypeVar("R")


def isolates_errors(
    method: "Callable[Concatenate[OnlineTrainer, P], R]",
) -> "Callable[Concatenate[OnlineTrainer, P], R | None]":
    """An error in draft training must fail neither samples nor training: it is logged, and from
    then on every such method of this trainer does nothing and returns None."""

    @functools.wraps(method)
    def isolated(self: "OnlineTrainer", *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self.is_over:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception:
            logger.exception("online training of the draft has failed and is off from here on")
            self.is_over = True
            return None

    return isolated


class OnlineTrainer:
    """Of one base model, owned by the thread that samples and trains. trainee None: no draft is
    trained, but acceptance is logged. is_over: training has failed, see the log."""

    def __init__(
        self,
        folder: DraftFolder,
        store: CaseStore,
        trainee: DraftTrainee | None = None,
        settings: OnlineSettings | None = None,
    ):
        self._settings = settings or OnlineSettings()
        self._folder, self._trainee = folder, trainee
        self._collector = CaseCollector(store)
        self._acceptance = AcceptanceLog(folder.root)
        self._driver = self._driver_of(trainee)
        self._served = self._folder.find("best")
        self._temperature = 1.0
        self._step = self._num_passes = self._num_written = self._served_step = 0
        self._last_result: TrainingResult | None = None
        self._written_s = self._line_s = 0.0
        self.speculation: Renewable | None = None
        self.is_over = False

    def _driver_of(self, trainee: DraftTrainee | None) -> TrainingDriver[Any] | None:
        share, training = self._settings.share, self._settings.training
        if trainee is None or share <= 0:
            return None
        driver = TrainingDriver(
            trainee.trainer, trainee.dataset, self._folder, TimeBudget(share), training
        )
        if self._folder.find("best") is None:  # a rollback needs a version to return to
            driver.publish({"reason": "as it was before any training"})
        return driver

    # ---- events: of speculation, of training passes

    @property
    def version_lag(self) -> int:
        return self._step - self._served_step if self._trainee is not None else 0

    @isolates_errors
    def drafted(self, category: str, num_judged: int, num_accepted: int) -> None:
        self._acceptance.add(self._step, num_judged, num_accepted, category)

    @isolates_errors
    def judged(self, stream: Stream, token: JudgedToken, category: str) -> None:
        if self._driver is not None:
            self._collector.judged(stream, token, category)

    @isolates_errors
    def ended(self, stream: Stream) -> None:
        self._temperature = stream.params.temperature
        self._collector.ended(stream)

    @isolates_errors
    def observer(self, model_ids: Sequence[str]) -> PassCapture | None:
        """Of a pass in which these models train."""
        trainee, driver = self._trainee, self._driver
        if trainee is None or driver is None or not trainee.layers or not driver.budget.may_borrow:
            return None
        self._num_passes += 1
        metadata = [
            SequenceMetadata(self._temperature, self._step, category=name) for name in model_ids
        ]
        settings = CaptureSettings(
            trainee.layers, self._settings.pass_rows, self._num_passes, metadata
        )
        return PassCapture(settings, trainee.add, driver.budget)

    @isolates_errors
    def stepped(self, took_s: float) -> None:
        """A model of this base has made a step; took_s: of work since the last one."""
        self._step += 1
        if self._driver is not None:
            self._driver.policy_stepped(self._step, took_s, self._acceptance.unwritten_rate)
        self._write_line()

    # ---- work

    @property
    @isolates_errors
    def is_due(self) -> bool:
        return self._driver is not None and self._driver.is_due

    @property
    @isolates_errors
    def is_overdue(self) -> bool:
        """Due, and the device has not been idle for long."""
        driver = self._driver
        return driver is not None and driver.budget.is_overdue and driver.is_due

    @isolates_errors
    def work(self) -> None:
        """A step of training, or its end."""
        assert self._driver is not None
        try:
            result = self._driver.work(max_steps=1)
        except UserError as error:
            logger.warning("training of the draft was given up: %s", error)
            return
        if result is None:
            return
        self._last_result = result
        logger.info(
            "a draft was trained (%s): expected accepted tokens of a draft %.3f, before %.3f; %s",
            *(result.reason, result.after.mean, result.before.mean),
            "used" if result.promoted else "not used",
        )
        if result.promoted:
            self._use_served()

    @isolates_errors
    def poll(self, now_s: float, *, idle: bool) -> None:
        """Switches to the best draft where somebody chose another; writes log and cases."""
        if self._driver is not None and self._folder.find("best") not in (None, self._served):
            try:
                self._driver.use("best")
            except (NotFound, UserError) as error:
                logger.warning("the chosen draft cannot be used: %s", error)
                self._served = self._folder.find("best")
            else:
                self._use_served()
        if now_s - self._line_s > LINE_S:
            self._line_s = now_s
            self._write_line()
        if idle and now_s - self._written_s > WRITE_S:
            self._written_s = now_s
            self._write_cases()

    def _use_served(self) -> None:
        assert self._trainee is not None
        assert self._driver is not None
        self._trainee.use(self._driver.served)
        self._served, self._served_step = self._folder.find("best"), self._step
        if self.speculation is not None:
            self.speculation.renew()

    def _write_line(self) -> None:
        try:
            self._acceptance.write(self._step, self._served or "")
        except OSError as error:
            logger.warning("the acceptance log cannot be written: %s", error)

    def _write_cases(self) -> None:
        store, path = self._collector.store, self._folder.root / CASES
        if store.num_added == self._num_written:
            return
        self._num_written = store.num_added
        try:
            store.write(path)
        except OSError as error:
            logger.warning("%s cannot be written: %s", path, error)

    # ---- telemetry

    def snapshot(self) -> dict[str, Any]:
        store, driver = self._collector.store, self._driver
        snapshot: dict[str, Any] = {
            "policy_steps": self._step,
            "is_over": self.is_over,
            "acceptance": self._acceptance.tracker.as_json(),
            "cases": {"disagreed": len(store.disagreed), "agreed": len(store.agreed)},
        }
        if driver is not None:
            last = self._last_result
            snapshot["draft"] = self._served
            snapshot["training_s"] = driver.budget.spent_s
            snapshot["allowed_s"] = driver.budget.earned_s
            snapshot["last_training"] = last.as_json() if last is not None else None
        return snapshot


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

    def are_due(self, *, idle: bool) -> bool:
        """Whether a training should run now: while the engine is idle, or although it is not."""
        trainers = self._trainers.values()
        return any(trainer.is_due if idle else trainer.is_overdue for trainer in trainers)

    def work(self) -> None:
        for trainer in self._trainers.values():
            if trainer.is_due:
                trainer.work()
                return

    def poll(self, now_s: float, *, idle: bool) -> None:
        for trainer in self._trainers.values():
            trainer.poll(now_s, idle=idle)

    def snapshot(self) -> dict[str, dict[str, Any]]:
        return {self._names[key]: trainer.snapshot() for key, trainer in self._trainers.items()}
