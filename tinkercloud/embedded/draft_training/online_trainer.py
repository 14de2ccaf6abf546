"""A draft that keeps in step with the policy by itself, while the server does its other work.

What it learns from is looked on: hidden states and laws in the policy's own training passes
(`capture`), disagreements while samples are written (`speculative.learning.collecting`). It trains
when the policy has made a step or acceptance has fallen, a step at a time, in a share of the time
that the policy's own steps take, and is used from the next round on where the gate lets it through.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from torch import Tensor

from tinkercloud.embedded.draft_training.capture import CaptureSettings, PassCapture
from tinkercloud.embedded.draft_training.driver import (
    Dataset,
    TrainingDriver,
    TrainingResult,
    TrainingSettings,
)
from tinkercloud.embedded.draft_training.fit import Plan, Trainer
from tinkercloud.embedded.draft_training.head_trainer import CapturedSequence, SequenceMetadata
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
LINE_S = 60.0  # between two lines of acceptance where the policy makes no step
WRITE_S = 30.0  # between two times that cases are written, while there is nothing else to do


@dataclass(frozen=True, slots=True)
class OnlineSettings:
    """share: of the time of the policy's steps, 0 for no training. memory_bytes: of what is kept to
    learn from; max_age: versions after which it is forgotten. pass_rows: captured in one pass of
    training."""

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
    """What is trained. use: draft with these parameters from the next round on. layers: of the
    target, whose outputs `took` wants to see in training passes; () where cases are enough."""

    trainer: Trainer[Any]
    dataset: Dataset[Any]
    use: Callable[[Mapping[str, Tensor]], None]
    layers: tuple[int, ...] = ()
    took: Callable[[CapturedSequence], None] = lambda sequence: None


class Renewed(Protocol):
    def renew(self) -> None:
        """Another draft, or another policy."""
        ...


P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate[Any, P], R]


def isolating_errors(otherwise: Any) -> Callable[[Method[P, R]], Method[P, R]]:
    """Whatever goes wrong in the method, samples and training go on: the loop is over, and from
    then on answers `otherwise`."""

    def guarded(method: Method[P, R]) -> Method[P, R]:
        @functools.wraps(method)
        def tried(self: "OnlineTrainer", *args: P.args, **kwargs: P.kwargs) -> R:
            if self.is_over:
                return otherwise
            try:
                return method(self, *args, **kwargs)
            except Exception:
                logger.exception("the draft does not follow the policy any more")
                self.is_over = True
                return otherwise

        return tried

    return guarded


class OnlineTrainer:
    """Of one base model, owned by the thread that samples and trains. trainee None: nothing here
    can be trained, but acceptance is written down. is_over: something went wrong, see the log."""

    def __init__(
        self,
        folder: DraftFolder,
        store: CaseStore,
        trainee: DraftTrainee | None = None,
        following: OnlineSettings | None = None,
    ):
        self._following = following or OnlineSettings()
        self._folder, self._trainee = folder, trainee
        self._collector = CaseCollector(store)
        self._acceptance = AcceptanceLog(folder.root)
        self._driver = self._driver_of(trainee)
        self._served = self._best()
        self._temperature = 1.0
        self._step = self._turn = self._num_written = self._served_step = 0
        self._last: TrainingResult | None = None
        self._written_s = self._line_s = 0.0
        self.speculation: Renewed | None = None
        self.is_over = False

    def _driver_of(self, trainee: DraftTrainee | None) -> TrainingDriver[Any] | None:
        following = self._following
        if trainee is None or following.share <= 0:
            return None
        budget = TimeBudget(following.share)
        driver = TrainingDriver(
            trainee.trainer, trainee.dataset, self._folder, budget, following.training
        )
        if self._best() is None:
            driver.publish({"reason": "as it was before any training"})
        return driver

    # ---- what goes by: the listener of speculation, the witness of training passes

    @property
    def version_lag(self) -> int:
        return self._step - self._served_step if self._trainee is not None else 0

    @isolating_errors(None)
    def drafted(self, category: str, num_judged: int, num_accepted: int) -> None:
        self._acceptance.add(self._step, num_judged, num_accepted, category)

    @isolating_errors(None)
    def judged(self, stream: Stream, verdict: JudgedToken, category: str) -> None:
        if self._driver is not None:
            self._collector.judged(stream, verdict, category)

    @isolating_errors(None)
    def ended(self, stream: Stream) -> None:
        self._temperature = stream.params.temperature
        self._collector.ended(stream)

    @isolating_errors(None)
    def witness(self, model_ids: Sequence[str]) -> PassCapture | None:
        """Of a pass in which these models train."""
        trainee, driver = self._trainee, self._driver
        if trainee is None or driver is None or not trainee.layers or not driver.budget.may_borrow:
            return None
        self._turn += 1
        told = [
            SequenceMetadata(0, self._temperature, self._step, category=name) for name in model_ids
        ]
        wanted = CaptureSettings(trainee.layers, self._following.pass_rows, self._turn, told)
        return PassCapture(wanted, trainee.took, driver.budget)

    @isolating_errors(None)
    def stepped(self, took_s: float) -> None:
        """A model of this base has made a step; took_s: of work since the last one."""
        self._step += 1
        if self._driver is not None:
            self._driver.policy_stepped(self._step, took_s, self._acceptance.unwritten_rate)
        self._write_line()

    # ---- work

    @property
    @isolating_errors(False)
    def is_due(self) -> bool:
        return self._driver is not None and self._driver.is_due

    @property
    @isolating_errors(False)
    def is_overdue(self) -> bool:
        """Due, and the device has not been idle for long."""
        return self._driver is not None and self._driver.budget.is_overdue and self.is_due

    @isolating_errors(None)
    def work(self) -> None:
        """A step of training, or its end."""
        assert self._driver is not None
        try:
            result = self._driver.work(most_steps=1)
        except UserError as error:
            logger.warning("training of the draft was given up: %s", error)
            return
        if result is None:
            return
        self._last = result
        logger.info(
            "a draft was trained (%s): %.3f of its tokens were expected to stand, now %.3f; %s",
            *(result.reason, result.before.mean, result.after.mean),
            "used" if result.promoted else "not used",
        )
        if result.promoted:
            self._use_served()

    @isolating_errors(None)
    def look(self, now_s: float, *, idle: bool) -> None:
        """Has somebody chosen another draft? And what was collected goes to disk."""
        if self._driver is not None and self._best() not in (None, self._served):
            try:
                self._driver.use("best")
            except (NotFound, UserError) as error:
                logger.warning("the draft that was chosen cannot be used: %s", error)
                self._served = self._best()
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
        self._served, self._served_step = self._best(), self._step
        if self.speculation is not None:
            self.speculation.renew()

    def _best(self) -> str | None:
        try:
            return self._folder.resolve("best")
        except NotFound:
            return None

    def _write_line(self) -> None:
        try:
            self._acceptance.write(self._step, self._served or "")
        except OSError as error:
            logger.warning("acceptance cannot be written down: %s", error)

    def _write_cases(self) -> None:
        store = self._collector.store
        if store.num_added == self._num_written:
            return
        self._num_written = store.num_added
        path = self._folder.root / CASES
        try:
            store.write(path)
        except OSError as error:
            logger.warning("%s cannot be written: %s", path, error)

    # ---- for those who watch

    def snapshot(self) -> dict[str, Any]:
        store, driver = self._collector.store, self._driver
        told: dict[str, Any] = {
            "policy_steps": self._step,
            "is_over": self.is_over,
            "acceptance": self._acceptance.tracker.as_json(),
            "cases": {"disagreed": len(store.disagreed), "agreed": len(store.agreed)},
        }
        if driver is not None:
            told["draft"] = self._served
            told["training_s"] = driver.budget.spent_s
            told["allowed_s"] = driver.budget.earned_s
            told["last_training"] = self._last.as_json() if self._last is not None else None
        return told


class OnlineTrainers:
    """Of all base models that an engine samples."""

    def __init__(self) -> None:
        self._loops: dict[int, OnlineTrainer] = {}
        self._names: dict[int, str] = {}

    def add(self, base: BaseModel, loop: OnlineTrainer) -> None:
        self._loops[id(base)], self._names[id(base)] = loop, base.name

    def witness(self, base: BaseModel, model_ids: Sequence[str]) -> PassCapture | None:
        loop = self._loops.get(id(base))
        return loop.witness(model_ids) if loop is not None else None

    def stepped(self, base: BaseModel, took_s: float) -> None:
        if id(base) in self._loops:
            self._loops[id(base)].stepped(took_s)

    def are_due(self, *, idle: bool) -> bool:
        """Whether one of them wants time, while there is nothing else to do or though there is."""
        loops = self._loops.values()
        return any(loop.is_due if idle else loop.is_overdue for loop in loops)

    def work(self) -> None:
        for loop in self._loops.values():
            if loop.is_due:
                loop.work()
                return

    def look(self, now_s: float, *, idle: bool) -> None:
        for loop in self._loops.values():
            loop.look(now_s, idle=idle)

    def snapshot(self) -> dict[str, dict[str, Any]]:
        return {self._names[key]: loop.snapshot() for key, loop in self._loops.items()}
