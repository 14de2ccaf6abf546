"""The whole contract between the services and whatever computes.

A backend holds *models* (a tenant's trainable weights and optimizer) and *versions* (immutable
published weights that sampling reads). Who calls promises: at most one operation of one model at a
time, in `seq_id` order (its lane); operations of different models, and samples, come concurrently.
All input was validated against `ServedModel` and `losses.LOSSES` before it came here.

Errors: `ModelStateLost` for a model, `VersionLost` for a version that the backend does not hold
(any more), `EngineDied` when the computing process ends underway, `UserError` for what only the
backend can know. Anything else that escapes is a defect and fails the future as category "server".
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from tinkercloud.core.types import (
    AdamParams,
    LoraSpec,
    OnTokens,
    SampleOutput,
    SampleRequest,
    ServedModel,
    StateCost,
    TrainBatch,
    TrainOutput,
    WeightsSource,
)
from tinkercloud.errors import RecoveryNotOffered, UserError

MakeRoom = Callable[[], Awaitable[bool]]


class Backend(ABC):
    """A few methods; every one may take seconds and none may block the event loop."""

    @abstractmethod
    async def start(self) -> tuple[ServedModel, ...]:
        """Begin to bring the backend up and return what it serves, the default model first. Calls
        may come from then on; those that compute wait where weights are still being loaded.

        Raises ConfigError when a model cannot be served.
        """

    async def loaded(self) -> None:
        """Until the weights that `start` began to load are there. Raises ConfigError when they
        cannot be: calls would wait for ever."""
        return

    @abstractmethod
    async def stop(self) -> None:
        """Release everything. Calls still underway fail with EngineDied."""

    @abstractmethod
    async def create_model(self, model_id: str, base_model: str, lora: LoraSpec) -> None:
        """A fresh model: B = 0, so it starts as the base model; step 0."""

    @abstractmethod
    async def load_model(
        self, model_id: str, base_model: str, directory: Path, *, with_optimizer: bool
    ) -> LoraSpec:
        """A model from a checkpoint folder, replacing a model of that id.

        Returns the checkpoint's LoraSpec. Without the optimizer it starts at step 0.
        """

    @abstractmethod
    async def delete_model(self, model_id: str) -> None:
        """Forget a model; unknown ids are ignored. Published versions stay."""

    @abstractmethod
    async def forward_backward(self, model_id: str, batch: TrainBatch) -> TrainOutput:
        """Add the gradient of the summed loss to the model's accumulator (unless forward_only).

        All or nothing: when it fails, the accumulator is as before.
        """

    @abstractmethod
    async def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """One AdamW step on the accumulated gradient, then clear it.

        Returns metrics with `unclipped_grad_l2:mean`. A gradient that is not finite raises
        GradientNotFinite, clears the accumulator and leaves the weights unchanged. Weights or
        moments that would not be finite raise WeightsNotFinite, and the model is as before.
        """

    @abstractmethod
    async def save_model(self, model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Write the model's files into an existing, empty folder (the caller renames it)."""

    @abstractmethod
    async def publish(self, source: WeightsSource) -> str:
        """Make an immutable weights version for sampling; returns its id."""

    @abstractmethod
    async def release(self, version: str) -> None:
        """No new samples will come for it; those underway finish. Unknown ids are ignored."""

    @abstractmethod
    async def sample(
        self, version: str, request: SampleRequest, on_tokens: OnTokens | None = None
    ) -> SampleOutput:
        """A pure function of (weights, prompt, params, seed, sample index).

        on_tokens gets the same tokens as they are drawn, all of them before this returns.
        Cancelling the call ends its samples.
        """

    def use_for_room(self, make_room: "MakeRoom") -> None:
        """Where memory is short for a call, one that refuses it (MemoryShort) calls this before, as
        long as it is True: something that nobody uses was put away."""
        return

    def incarnation(self) -> int | None:
        """Which beginning of its memory this is: models and versions of an earlier one are gone.
        None: nothing of this backend comes back, and the four calls for copies of states raise
        RecoveryNotOffered. Cheap."""
        return None

    def numerics(self) -> str:
        """The class of machines and builds that compute the same bits as this one: instruction set,
        number type, kernels, libraries. "": not known."""
        return ""

    async def copy_state(self, model_id: str) -> int:
        """Copy all that training has made of a model (weights, moments, number of steps,
        accumulated gradient), as it is after the operations so far. The number is for
        `write_state`, once; a newer copy of the model replaces one that is not written, and where
        there is no memory for a copy it lasts until the model's next operation."""
        raise RecoveryNotOffered

    async def write_state(self, copy: int, directory: Path) -> StateCost:
        """Write a copy into an existing, empty folder, flushed to the disk (files and folder);
        operations go on meanwhile. The copy is gone then, also where this fails. Raises
        StateCopyLost."""
        raise RecoveryNotOffered

    async def drop_copy(self, copy: int) -> None:
        """Free a copy that nobody will write. One that is gone is ignored."""
        raise RecoveryNotOffered

    async def write_version(self, version: str, directory: Path) -> None:
        """Write a published version into an existing, empty folder, flushed to the disk, as a
        checkpoint from which `publish` makes the same version, bit for bit."""
        raise RecoveryNotOffered

    async def restore_state(self, model_id: str, base_model: str, directory: Path) -> None:
        """A model from a folder of `write_state`, replacing a model of that id: every later
        operation gives the same bits as if nothing had happened. Raises StateDamaged."""
        raise RecoveryNotOffered

    def queue_state(self, subject: str) -> str | None:
        """Why an operation of this model, or a sample from this version, waits for capacity, in
        words for its user; None: it does not. Cheap; asked when a poll ends without a result."""
        return None

    def trouble(self) -> str | None:
        """What keeps this backend from serving just now, in words for its operator; None: nothing.
        Cheap."""
        return None

    async def readiness(self) -> Mapping[str, str | None]:
        """By part ("engine", "placement"): why it cannot serve just now; None: it can. May ask
        other processes; whoever calls sets a deadline, and remembers the answer for a while."""
        return {"engine": self.trouble()}

    def speculation(self) -> dict[str, Any]:
        """What drafts do, by base model, for JSON; empty where the backend has none of its own."""
        return {}

    async def train_draft(self, base_model: str) -> None:
        """Train this model's draft on what was sampled, once nobody asks for anything else; what
        comes of it is in `speculation`. Raises UserError where no draft learns."""
        raise UserError("this backend trains no drafts")

    def metrics(self) -> list[str]:
        """Lines in Prometheus' text format, in addition to those of `stats`."""
        return []

    @abstractmethod
    def stats(self) -> dict[str, float | int | str]:
        """A cheap snapshot for health pages; never blocks."""
