"""The progress of a client's requests, reported to a callback and the log."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tinker_gmi.bodies.responses import QueueState, TryAgainResponse

logger = logging.getLogger("tinker_gmi")

LOG_PERIOD_S = 60.0

RequestType = Literal[
    "CreateModel",
    "LoadWeights",
    "Forward",
    "ForwardBackward",
    "OptimStep",
    "SaveWeights",
    "SaveWeightsForSampler",
    "SaveWeightsExternal",
    "Sample",
    "CreateCustomLoss",
]


@dataclass(frozen=True, slots=True)
class Work:
    """A request that the server has acknowledged; subject: its model or sampling session."""

    request_id: str
    type: RequestType
    subject: str


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of one request.

    state: "accepted" by the server; "waiting" at each long poll that ends without its result;
    "paused": the same, while the server has no room for it, for `reason`; "done"; "failed", for
    `reason`. elapsed_s: seconds since it was accepted.
    """

    work: Work
    state: Literal["accepted", "waiting", "paused", "done", "failed"]
    elapsed_s: float
    reason: str | None = None


ProgressCallback = Callable[[Progress], None]
QueueCallback = Callable[[QueueState, str | None], None]


class Report:
    """Tells about one request. What a callback raises is logged, and does not end the request."""

    def __init__(
        self, work: Work, on_progress: ProgressCallback | None, on_queue: QueueCallback | None
    ):
        self.work = work
        self._on_progress = on_progress
        self._on_queue = on_queue
        self._accepted_at = time.monotonic()
        self._tell("accepted")

    def pending(self, answer: TryAgainResponse) -> None:
        if self._on_queue is not None:
            try:
                self._on_queue(answer.queue_state, answer.queue_state_reason)
            except Exception:  # the user's function; the result must come all the same
                logger.exception("on_queue_state_change raised")
        paused = answer.queue_state != "active"
        self._tell("paused" if paused else "waiting", answer.queue_state_reason)

    def ended(self, error: BaseException | None) -> None:
        self._tell("done" if error is None else "failed", None if error is None else str(error))

    def _tell(
        self,
        state: Literal["accepted", "waiting", "paused", "done", "failed"],
        reason: str | None = None,
    ) -> None:
        if self._on_progress is None:
            return
        elapsed_s = time.monotonic() - self._accepted_at
        try:
            self._on_progress(Progress(self.work, state, elapsed_s, reason))
        except Exception:  # the user's function; the result must come all the same
            logger.exception("on_progress raised")


class QueueLog:
    """Warns of a pause, at most once a minute."""

    def __init__(self, what: str):
        self._what = what
        self._logged_at = -LOG_PERIOD_S

    def __call__(self, queue_state: QueueState, reason: str | None) -> None:
        now = time.monotonic()
        if queue_state == "active" or now - self._logged_at < LOG_PERIOD_S:
            return
        self._logged_at = now
        logger.warning(
            "%s is paused (%s): %s", self._what, queue_state, reason or "no reason given"
        )
