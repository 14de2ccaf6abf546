"""The engine process's handler of each request type of `protocol`. Runs in the worker thread."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tinkercloud.core.types import LoraSpec, SampleOutput, StateCost, TrainOutput
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.process.protocol import (
    Call,
    Cancel,
    CopyState,
    CreateModel,
    DeleteModel,
    DropCopy,
    ForwardBackward,
    Handler,
    LoadModel,
    OptimStep,
    Ping,
    Publish,
    Release,
    Reply,
    Request,
    RestoreState,
    Sample,
    SaveModel,
    TableRow,
    TrainDraft,
    WriteState,
    WriteVersion,
)
from tinkercloud.embedded.process.state_copies import FileWriter
from tinkercloud.embedded.process.token_outbox import TokenOutbox
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.embedded.sampling.sequences import Job
from tinkercloud.embedded.training.queue import TrainingQueue
from tinkercloud.errors import UnknownRequest

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class DraftHooks:
    """after_optim_step: of a model of that base. train: the draft of the base model of that name;
    raises UserError."""

    after_optim_step: Callable[[BaseModel], None]
    train: Callable[[str], None]


class RequestHandlers:
    """`sample` and `forward_backward` queue their work, `write_state` and `write_version` leave it
    to a thread; the others are done when they return."""

    def __init__(
        self,
        models: ModelStore,
        engine: SamplingEngine,
        training: TrainingQueue,
        tokens: TokenOutbox,
        drafts: DraftHooks,
    ):
        self._models = models
        self._engine = engine
        self._training = training
        self._tokens = tokens
        self._drafts = drafts
        self._samples: dict[int, Job] = {}  # by call
        self._writer = FileWriter()
        self._table = _table(
            CreateModel.answered_by(self.create_model),
            LoadModel.answered_by(self.load_model),
            DeleteModel.answered_by(self.delete_model),
            ForwardBackward.queued_by(self.forward_backward),
            OptimStep.answered_by(self.optim_step),
            SaveModel.answered_by(self.save_model),
            CopyState.answered_by(self.copy_state),
            WriteState.queued_by(self.write_state),
            DropCopy.answered_by(self.drop_copy),
            RestoreState.answered_by(self.restore_state),
            Publish.answered_by(self.publish),
            Release.answered_by(self.release),
            WriteVersion.queued_by(self.write_version),
            Sample.queued_by(self.sample),
            Cancel.answered_by(self.cancel),
            TrainDraft.answered_by(self.train_draft),
            Ping.answered_by(self.ping),
        )

    @property
    def request_types(self) -> frozenset[type[Request[object]]]:
        return frozenset(self._table)

    def handle(self, call: Call, send: Callable[[object], None]) -> None:
        """Serve one call. Exactly one Result is sent, now or later; errors are results too."""
        reply = Reply(call.id, send)
        try:
            handler = self._table.get(type(call.request))
            if handler is None:
                raise UnknownRequest(type(call.request).__name__)
            handler(call.request, reply)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            reply(error)

    # ---- models

    def create_model(self, request: CreateModel) -> None:
        self._models.create_model(request.model_id, request.base_model, request.lora)

    def load_model(self, request: LoadModel) -> LoraSpec:
        return self._models.load_model(
            request.model_id, request.base_model, request.directory, request.with_optimizer
        )

    def delete_model(self, request: DeleteModel) -> None:
        self._models.delete_model(request.model_id)

    def forward_backward(self, request: ForwardBackward, reply: Reply[TrainOutput]) -> None:
        model = self._models.model(request.model_id)
        self._models.changes(request.model_id)
        self._training.add(reply.call_id, model, request.batch)

    def optim_step(self, request: OptimStep) -> dict[str, float]:
        metrics = self._models.optim_step(request.model_id, request.params)
        self._drafts.after_optim_step(self._models.model(request.model_id).base)
        return metrics

    def save_model(self, request: SaveModel) -> None:
        self._models.save_model(request.model_id, request.directory, request.with_optimizer)

    # ---- states

    def copy_state(self, request: CopyState) -> int:
        return self._models.copy_state(request.model_id)

    def write_state(self, request: WriteState, reply: Reply[StateCost]) -> None:
        writing = self._models.state_writing(request.copy, request.directory)
        self._writer.add(_answered(writing, reply))

    def drop_copy(self, request: DropCopy) -> None:
        self._models.drop_copy(request.copy)

    def restore_state(self, request: RestoreState) -> None:
        self._models.restore_state(request.model_id, request.base_model, request.directory)

    # ---- versions

    def publish(self, request: Publish) -> str:
        return self._models.publish(request.source)

    def release(self, request: Release) -> None:
        self._engine.forget(request.version_id)
        self._models.release(request.version_id)

    def write_version(self, request: WriteVersion, reply: Reply[None]) -> None:
        writing = self._models.version_writing(request.version_id, request.directory)
        self._writer.add(_answered(writing, reply))

    def sample(self, request: Sample, reply: Reply[SampleOutput]) -> None:
        def end(outcome: SampleOutput | BaseException) -> None:
            del self._samples[reply.call_id]
            self._tokens.flush()
            reply(outcome)

        version = self._models.version(request.version_id)
        on_tokens = self._tokens.of(reply.call_id) if request.streams else None
        job = self._engine.submit(version, request.sample, end, on_tokens)
        self._samples[reply.call_id] = job

    def cancel(self, request: Cancel) -> None:
        job = self._samples.get(request.call_id)
        if job is not None:
            self._engine.cancel(job)

    def train_draft(self, request: TrainDraft) -> None:
        self._drafts.train(request.base_model)

    def ping(self, request: Ping) -> None:
        """Answered between two steps: the answer alone is what is asked for."""


def _answered(work: Callable[[], R], reply: Reply[R]) -> Callable[[], None]:
    """The work and then its reply, for another thread to call."""

    works = [work]

    def run() -> None:
        try:
            outcome = works.pop()()  # what it holds is free before anybody knows that it is done
        except Exception as error:  # noqa: BLE001 - the caller gets it
            reply(error)
        else:
            reply(outcome)

    return run


def _table(*rows: TableRow) -> Mapping[type[Request[object]], Handler]:
    table = dict(rows)
    assert len(table) == len(rows), "a request type has two handlers"
    return table
