"""Training of drafts while a server samples and trains, so that they keep up with the policy.

Heads learn from hidden states and distributions of the policy's own training passes (`capture`),
draft models from disagreements in rollouts (`speculative.learning.collecting`). A draft is trained
when the policy has made a step, acceptance has fallen or enough was collected, one step at a time,
within a share of the time of the policy's own steps; the next round uses it if it passes the gate.
Capture has its own part of that share, so that none of the two can starve the other. Quiet time, in
which nobody asks for anything, is free: there both learn from samples too, which the target reads
once more, so that a draft learns that is not drafted with because it does not pay yet.
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
    TrainingDriver,
    TrainingResult,
    TrainingSettings,
)
from tinkercloud.embedded.draft_training.files import UNTRAINED
from tinkercloud.embedded.draft_training.fit import Plan, Trainer
from tinkercloud.embedded.draft_training.sampled_texts import SampledTexts
from tinkercloud.embedded.model.version import Version
from tinkercloud.errors import NotFound, UserError
from tinkercloud.speculative.drafters.drafter import Stream
from tinkercloud.speculative.learning.cases import CaseStore
from tinkercloud.speculative.learning.collecting import CaseCollector, JudgedToken
from tinkercloud.speculative.learning.draft_folder import DraftFolder
from tinkercloud.speculative.learning.schedule import TRAINING_IS_OVER, TimeBudget
from tinkercloud.speculative.observability.acceptance_log import AcceptanceLog

logger = logging.getLogger(__name__)

CASES = "cases.jsonl"
LINE_S = 60.0  # between two lines of the acceptance log where the policy makes no step
WRITE_S = 30.0  # between two writes of the cases while the engine is idle
ONLINE_PLAN = Plan(num_steps=12, peak_rate=5e-4, warmup_steps=2)
ANY_LAYER = (1,)  # where nobody reads hidden states
QUIET_S = 0.5  # without work, after which time counts as quiet


@dataclass(frozen=True, slots=True)
class OnlineSettings:
    """share: of the time of the policy's steps, 0 for no training; capture_share: of that, for
    copying out of training passes. in_quiet_time: train also then. memory_bytes: of sequences and
    cases; max_age: versions after which they are dropped. pass_rows: captured in one training
    pass."""

    share: float = 0.1
    capture_share: float = 0.25
    in_quiet_time: bool = True
    memory_bytes: int = 256 * 1024**2
    max_age: int = 16
    pass_rows: int = 512
    case_share: float = 1 / 16  # of the memory
    training: TrainingSettings = field(default_factory=lambda: TrainingSettings(plan=ONLINE_PLAN))


@dataclass(frozen=True, slots=True)
class DraftTrainee:
    """A draft that is trained online. use: draft with these parameters from the next round on.
    layers: of the target, whose hidden states `add` takes; () where cases are enough, and `add`
    gets only what is read in quiet time."""

    trainer: Trainer[Any]
    dataset: Dataset[Any]
    use: Callable[[Mapping[str, Tensor]], None]
    layers: tuple[int, ...] = ()
    add: Callable[[CapturedSequence], None] = lambda sequence: None


class Renewable(Protocol):
    def renew(self, expected: Sequence[float] = ()) -> None:
        """Another draft, or another policy. expected: acceptance by depth, where it is known."""
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
        except Exception:  # drafts only make samples faster: these go on
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
        self._capture_budget = TimeBudget(self._settings.share * self._settings.capture_share)
        self._texts = SampledTexts()
        self._driver = self._driver_of(trainee)
        self._served = self._folder.find("best")
        self._temperature = 1.0
        self._step = self._num_passes = self._num_written = self._served_step = 0
        self._last_result: TrainingResult | None = None
        self._num_promoted = self._num_refused = self._num_failed = 0
        self._written_s = self._line_s = 0.0
        self.speculation: Renewable | None = None
        self.is_over = False

    def _driver_of(self, trainee: DraftTrainee | None) -> TrainingDriver[Any] | None:
        settings = self._settings
        if trainee is None or settings.share <= 0:
            return None
        budget = TimeBudget(settings.share * (1 - settings.capture_share if trainee.layers else 1))
        driver = TrainingDriver(
            trainee.trainer, trainee.dataset, self._folder, budget, settings.training
        )
        if self._folder.find("best") is None:  # a rollback needs a version to return to
            driver.publish({"reason": UNTRAINED})
        return driver

    # ---- events: of speculation, of training passes

    @property
    def version_lag(self) -> int:
        return self._step - self._served_step if self._trainee is not None else 0

    @property
    def reads_distributions(self) -> bool:
        return self._driver is not None and not self.is_over

    @property
    def has_promoted(self) -> bool:
        return self._num_promoted > 0

    @isolates_errors
    def drafted(self, category: str, num_judged: int, num_accepted: int) -> None:
        self._acceptance.add(self._step, num_judged, num_accepted, category)
        if self._driver is not None:
            self._driver.trigger.judged(num_judged, num_accepted)

    @isolates_errors
    def judged(self, stream: Stream, token: JudgedToken, category: str) -> None:
        if self._driver is not None:
            self._collector.judged(stream, token, category)

    @isolates_errors
    def ended(self, stream: Stream, version: Version) -> None:
        self._temperature = stream.params.temperature
        num_before = self._collector.store.num_added
        self._collector.ended(stream)
        if self._trainee is None or self._driver is None:
            return
        num_new = 0 if self._trainee.layers else self._collector.store.num_added - num_before
        if self._settings.in_quiet_time:
            num_new = max(num_new, self._texts.add(stream, version))
        self._driver.trigger.collected(num_new)

    @isolates_errors
    def forget(self, version_id: str) -> None:
        self._texts.forget(version_id)

    @isolates_errors
    def observer(self, model_ids: Sequence[str]) -> PassCapture | None:
        """Of a pass in which these models train."""
        trainee, driver = self._trainee, self._driver
        if trainee is None or driver is None or not trainee.layers:
            return None
        if not self._capture_budget.may_borrow:
            return None
        self._num_passes += 1
        metadata = [
            SequenceMetadata(self._temperature, self._step, category=name) for name in model_ids
        ]
        settings = CaptureSettings(
            trainee.layers, self._settings.pass_rows, self._num_passes, metadata
        )
        return PassCapture(settings, trainee.add, self._capture_budget)

    @isolates_errors
    def stepped(self, took_s: float) -> None:
        """A model of this base has made a step; took_s: of work since the last one."""
        self._step += 1
        self._texts.clear()  # by an older policy
        self._capture_budget.step_took(took_s)
        if self._driver is not None:
            self._driver.policy_stepped(self._step, took_s, self._acceptance.unwritten_rate)
        self._write_line()

    def ask(self) -> None:
        """Train in the next quiet time, whether or not it is due. Raises UserError."""
        driver = self._driver
        if self.is_over:
            raise UserError(TRAINING_IS_OVER)
        if driver is None:
            raise UserError("no draft learns here: see `--speculate` and `engine.draft_share`")
        if not self._texts and not driver.can_learn:
            raise UserError("too little was sampled yet for a draft to learn from")
        driver.trigger.is_asked = True

    # ---- work

    @property
    @isolates_errors
    def is_due(self) -> bool:
        """Within the budget."""
        return self._driver is not None and self._driver.is_due()

    @property
    @isolates_errors
    def is_overdue(self) -> bool:
        """Due, although samples wait."""
        return self._driver is not None and self._driver.is_overdue

    @property
    @isolates_errors
    def is_due_in_quiet(self) -> bool:
        """Whatever is left of the budget."""
        driver = self._driver
        if driver is None or not (self._settings.in_quiet_time or driver.trigger.is_asked):
            return False
        return self._waits_for_texts or driver.is_due(quiet=True)

    @property
    def _waits_for_texts(self) -> bool:
        """A training is due for which there are samples that no pass has read."""
        assert self._driver is not None
        return bool(self._texts) and self._driver.reason is not None

    @isolates_errors
    def work(self, *, quiet: bool = False) -> None:
        """One piece of it: a sample that is read, or a small part of a training."""
        assert self._driver is not None
        if quiet and self._waits_for_texts:
            self._read_text()
            if not self._texts and not self._driver.can_learn:
                self._driver.trigger.is_asked = False
            return
        try:
            result = self._driver.work(in_parts=True, quiet=quiet)
        except UserError as error:
            self._num_failed += 1
            logger.warning("training of the draft was given up: %s", error)
            return
        if result is not None:
            self._ended(result)

    def _read_text(self) -> None:
        trainee = self._trainee
        assert trainee is not None
        with self._capture_budget.spending(quiet=True):
            if trainee.layers:
                trainee.add(self._texts.capture_next(trainee.layers, self._step))
            else:
                trainee.add(self._texts.capture_next(ANY_LAYER))

    def _ended(self, result: TrainingResult) -> None:
        self._last_result = result
        self._num_promoted += result.promoted
        self._num_refused += not result.promoted
        logger.info(
            "a draft was trained (%s): expected accepted tokens of a draft %.3f, before %.3f; %s",
            *(result.reason, result.after.mean, result.before.mean),
            "used" if result.promoted else "not used",
        )
        if result.promoted:
            self._use_served(result.after.by_depth)

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

    def _use_served(self, expected: Sequence[float] = ()) -> None:
        assert self._trainee is not None
        assert self._driver is not None
        self._trainee.use(self._driver.served)
        self._served, self._served_step = self._folder.find("best"), self._step
        if self.speculation is not None:
            self.speculation.renew(expected)

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
            snapshot["seconds"] = self._seconds(driver)
            snapshot["allowed_s"] = driver.budget.earned_s
            snapshot["trainings"] = {
                "used": self._num_promoted,
                "refused": self._num_refused,
                "failed": self._num_failed,
            }
            snapshot["is_asked"] = driver.trigger.is_asked
            snapshot["last_training"] = last.as_json() if last is not None else None
        return snapshot

    def _seconds(self, driver: TrainingDriver[Any]) -> dict[str, float]:
        """What following the policy has taken, by what and when."""
        capture, training = self._capture_budget, driver.budget
        return {
            "capture": capture.spent_s,
            "training": training.spent_s,
            "capture in quiet time": capture.quiet_s,
            "training in quiet time": training.quiet_s,
        }
