"""The queue of forward_backward calls of all models, run in short steps.

Users alternate by what their micro-batches have of tokens, and each user's models by micro-batch.
Micro-batches of different LoRA models that wait at the same time
share one pass where they fit: many small ones cost little more than one. A call's gradient is added
to its model when the whole call is done, and not at all when it fails.
"""

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.core.types import TrainBatch, TrainOutput
from tinkercloud.embedded.fairness.recent_users import RecentUsers
from tinkercloud.embedded.fairness.virtual_counters import VirtualCounters
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.training.micro_batch_pass import Share, run_pass
from tinkercloud.embedded.training.micro_batches import Limits, MicroBatch, micro_batches
from tinkercloud.embedded.training.observer import PassObserver
from tinkercloud.embedded.training.reference import run_reference
from tinkercloud.embedded.training.targets import PER_SEQUENCE
from tinkercloud.embedded.training.trainable_model import TrainableModel

ObserverFactory = Callable[[BaseModel, Sequence[str]], PassObserver | None]
Admission = Callable[[TrainableModel, Sequence[MicroBatch]], None]
"""Makes the observer of a pass in which these models train; None: there is none."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A call that is done: exactly one of output and error is not None."""

    call_id: int
    output: TrainOutput | None = None
    error: Exception | None = None


@dataclass(slots=True)
class _Job:
    """A call. micro_batches: all of its own. added: the gradient, to which each pass adds at once:
    one of its own would double the memory."""

    call_id: int
    model: TrainableModel
    batch: TrainBatch
    micro_batches: Sequence[MicroBatch]
    waiting: list[MicroBatch] = field(init=False)
    added: dict[str, Tensor] = field(init=False)
    outputs: dict[int, dict[str, NDArray[np.float32]]] = field(init=False)
    loss: float = field(init=False)
    alone: bool = False

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Anew, where something was computed: of a pass that fails a part may be added."""
        self.waiting, self.added, self.outputs, self.loss = list(self.micro_batches), {}, {}, 0.0

    def share(self) -> Share:
        """Of the next micro-batch."""
        return Share(self.model.weights(self.added), self.batch, self.waiting[0].indices)

    def take(self, share: Share) -> None:
        self.outputs |= zip(share.indices, share.outputs, strict=True)
        self.loss += share.loss
        del self.waiting[0]

    def finish(self) -> Finished:
        _add_gradients(self.model.grads, self.added)
        outputs = tuple(self.outputs[i] for i in range(len(self.batch.data)))
        output = TrainOutput(outputs, {"loss:sum": self.loss})
        return Finished(self.call_id, output)


@dataclass(slots=True)
class _Running:
    """The current pass; jobs[i] owns shares[i]."""

    jobs: list[_Job]
    shares: list[Share]
    steps: Generator[None, None, None]


class TrainingQueue:
    """Owned by one thread. A step never raises: every error is the answer to a call. require: is
    called with what the passes of a new call will be; it may raise."""

    def __init__(
        self,
        limits: Limits,
        observer_for: ObserverFactory | None = None,
        require: Admission | None = None,
    ):
        self._limits, self._observer_for, self._require = limits, observer_for, require
        self._jobs: list[_Job] = []
        self._running: _Running | None = None
        self._last_pass: dict[str, int] = {}
        self._num_passes = 0
        self._counters = VirtualCounters()
        self._recent = RecentUsers()

    def __len__(self) -> int:
        """Calls that are not finished."""
        return len(self._jobs)

    @property
    def model_ids(self) -> frozenset[str]:
        """With calls that are not finished."""
        return frozenset(job.model.id for job in self._jobs)

    def users_lately(self) -> frozenset[str]:
        """With calls, or with some a moment ago."""
        return self._recent.users() | self._counters.users

    def add(self, call_id: int, model: TrainableModel, batch: TrainBatch) -> None:
        shares = model.base.is_llama_family
        micro = tuple(micro_batches(batch.data, self._limits, model.kept_bytes(), shares=shares))
        if self._require is not None:
            self._require(model, micro)
        self._jobs.append(_Job(call_id, model, batch, micro))
        self._counters.enter(batch.user)
        # A model with a first call queues behind those that wait: else a stream of small calls of
        # new models would always go first.
        self._last_pass.setdefault(model.id, self._num_passes)

    def step(self, budget_s: float = 0.0) -> list[Finished]:
        """Runs until the budget is used (at least a block of one pass) or calls are finished."""
        until = time.monotonic() + budget_s
        while self._jobs:
            finished = self._advance()
            if finished or time.monotonic() >= until:
                return finished
        return []

    def _advance(self) -> list[Finished]:
        done = [job for job in self._jobs if not job.waiting]  # a batch without data
        if done:
            return [self._remove(job, job.finish()) for job in done]
        if self._running is None:
            self._running = self._next_pass()
        running = self._running
        try:
            next(running.steps)
        except StopIteration:
            self._running = None
            return self._conclude(running)
        except Exception as error:  # noqa: BLE001 - it becomes the answer of the call
            self._running = None
            return self._broken(running.jobs, error)
        return []

    # ---- the next pass

    def _next_pass(self) -> _Running:
        jobs = self._together(self._longest_waiting())
        self._num_passes += 1
        for job in jobs:
            self._last_pass[job.model.id] = self._num_passes
            self._counters.charge(job.batch.user, job.waiting[0].num_rows)
        self._forget_idle_models()
        shares = [job.share() for job in jobs]
        base, recompute = jobs[0].model.base, jobs[0].waiting[0].recompute
        if not base.is_llama_family:
            return _Running(jobs, shares, run_reference(base, shares, recompute=recompute))
        observer = self._observer(base, jobs)
        steps = run_pass(base, shares, recompute=recompute, observer=observer)
        return _Running(jobs, shares, steps)

    def _observer(self, base: BaseModel, jobs: Sequence[_Job]) -> PassObserver | None:
        if self._observer_for is None or jobs[0].batch.forward_only:
            return None
        return self._observer_for(base, [job.model.id for job in jobs])

    def _longest_waiting(self) -> list[_Job]:
        """Every model's oldest call: the users first who were given least, and of a user's models
        the one whose last pass is longest ago."""
        oldest: dict[str, _Job] = {}
        for job in self._jobs:
            oldest.setdefault(job.model.id, job)

        def priority(job: _Job) -> tuple[float, int]:
            return self._counters.tokens_of(job.batch.user), self._last_pass[job.model.id]

        return sorted(oldest.values(), key=priority)

    def _together(self, candidates: Sequence[_Job]) -> list[_Job]:
        """The first candidate, and those that share its pass."""
        first, *others = candidates
        chosen, num_rows = [first], first.waiting[0].num_rows
        for job in others:
            rows = job.waiting[0].num_rows
            if _may_share(first, job) and num_rows + rows <= self._limits.tokens:
                chosen.append(job)
                num_rows += rows
        return chosen

    def _forget_idle_models(self) -> None:
        waiting = {job.model.id for job in self._jobs}
        self._last_pass = {m: number for m, number in self._last_pass.items() if m in waiting}

    # ---- the end of a pass

    def _conclude(self, running: _Running) -> list[Finished]:
        finished = []
        for job, share in zip(running.jobs, running.shares, strict=True):
            if share.error is not None:
                finished.append(self._remove(job, Finished(job.call_id, error=share.error)))
                continue
            job.take(share)
            if not job.waiting:
                finished.append(self._remove(job, job.finish()))
        return finished

    def _broken(self, jobs: Sequence[_Job], error: Exception) -> list[Finished]:
        """Which model's datums caused the error is unknown: each call runs again, alone."""
        if len(jobs) == 1:
            return [self._remove(jobs[0], Finished(jobs[0].call_id, error=error))]
        for job in jobs:
            job.begin()
            job.alone = True
        return []

    def _remove(self, job: _Job, result: Finished) -> Finished:
        self._jobs.remove(job)
        self._counters.leave(job.batch.user)
        self._recent.see(job.batch.user)
        return result


def _may_share(a: _Job, b: _Job) -> bool:
    def kind(job: _Job) -> tuple[bool, bool]:
        return job.batch.forward_only, job.batch.loss_fn in PER_SEQUENCE

    return (
        not (a.alone or b.alone)
        and a.model.base is b.model.base
        and a.model.adapter is not None
        and b.model.adapter is not None
        and not (a.waiting[0].recompute or b.waiting[0].recompute)
        and kind(a) == kind(b)
    )


def _add_gradients(into: dict[str, Tensor], grads: dict[str, Tensor]) -> None:
    """Entries that `into` lacks are taken over, not copied."""
    for name, grad in grads.items():
        if name in into:
            into[name].add_(grad)
        else:
            into[name] = grad


def train_alone(model: TrainableModel, batch: TrainBatch, limits: Limits) -> TrainOutput:
    """One call by itself, without a server; it adds to the model's gradient. Raises its error."""
    queue = TrainingQueue(limits)
    queue.add(0, model, batch)
    (call,) = queue.step(math.inf)
    if call.output is None:
        raise call.error or AssertionError("a call has an output or an error")
    return call.output
