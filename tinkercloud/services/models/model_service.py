"""Models: a tenant's fine-tunes, from creation to deletion."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import TypeVar

from pydantic import BaseModel

from tinker_gmi.types import (
    CreateModelRequest,
    GetInfoResponse,
    LoadWeightsRequest,
    LoraConfig,
    ModelData,
    UntypedAPIFuture,
)
from tinkercloud.core.pending import Pending, Resume, Work
from tinkercloud.errors import (
    EngineDied,
    InvalidRequest,
    ModelNotFound,
    NumberTaken,
    TinkercloudError,
)
from tinkercloud.services.checkpoints.checkpoint_names import Nearby
from tinkercloud.services.common.numbers import (
    create_key,
    train_key,
    train_seq_id,
    unload_key,
)
from tinkercloud.services.models.checkpoint_loader import CheckpointLoader
from tinkercloud.services.models.dependencies import Dependencies
from tinkercloud.services.recovery.lane_operations import (
    CREATE,
    LOAD,
    Loading,
    Submitted,
    as_json,
    changes_if_completed,
)
from tinkercloud.services.recovery.model_records import (
    check_optimizer,
    lora_record,
    lora_spec,
    new_model,
    with_metadata,
)
from tinkercloud.services.recovery.replayer import created
from tinkercloud.storage.futures import Outcome, Ticket, completed_json
from tinkercloud.storage.metadata import Model

UNLOAD = "UnloadModel"
TOUCH_EVERY_S = 10.0
logger = logging.getLogger(__name__)
Body = TypeVar("Body", bound=BaseModel)


class ModelService:
    def __init__(self, dependencies: Dependencies):
        self._backend = dependencies.backend
        self._catalog = dependencies.catalog
        self._metadata = dependencies.metadata
        self._tasks = dependencies.tasks
        self._sessions = dependencies.sessions
        self._checkpoints = dependencies.checkpoints
        self._on_policy = dependencies.on_policy
        self._loader = CheckpointLoader(dependencies)
        self._recovery = dependencies.recovery
        self._idle_s = dependencies.idle_model_s
        self._quotas = dependencies.quotas
        self._one_at_a_time = asyncio.Lock()  # creations: each counts those before it
        self._live: dict[tuple[str, str], Model] = {}
        self._num_changes = 0  # of models' records
        self._touched: dict[str, float] = {}
        self._freeing: set[asyncio.Task[None]] = set()
        self._sessions.when_finished(self._retire_session)
        self._tasks.when_finished(self._forget_failed)
        self._tasks.resume(UNLOAD, self._resumed_unloading)
        self._tasks.journal(CREATE, self._resumed_creation, changes_if_completed)
        self._tasks.journal(LOAD, self._resumed_loading, changes_if_completed)

    async def start(self) -> None:
        """Bring back, one after the other, what was in use until the last process ended: an
        operation that comes earlier does so itself."""
        if not self._recovery.is_offered:
            return
        kept = [
            m for name in await self._recovery.models() if (m := await self._metadata.model(*name))
        ]
        gone = [m for m in kept if await self._is_gone(m)]
        for model in gone:
            self._spawn_free(model)
        recent = time.time() - self._idle_s
        back = [m for m in kept if m not in gone and m.last_request_at > recent]
        self._tasks.spawn(self._bring_back(back), "bring back")

    async def _is_gone(self, model: Model) -> bool:
        """Deleted, and nothing has weights that only its journal has."""
        if model.state == "live":
            return False
        return not await self._metadata.is_sampled(model.user, model.model_id)

    async def _bring_back(self, models: list[Model]) -> None:
        for model in sorted(models, key=lambda model: -model.last_request_at):
            try:
                await self._recovery.ensure(self._tasks.lanes, model.user, model.model_id)
            except TinkercloudError as error:
                logger.error("%s", error)

    # creation

    async def create(self, user: str, body: CreateModelRequest) -> UntypedAPIFuture:
        await self._sessions.require_open(user, body.session_id)
        base_model = self._catalog.get(body.base_model).name
        check_optimizer(body.optimizer_config)
        lora = lora_record(body.lora_config or LoraConfig())
        model = new_model(user, body.session_id, body.model_seq_id, base_model, lora)
        model = with_metadata(model, body.user_metadata)

        request = json.dumps(asdict(lora)).encode()
        submitted = Submitted.of(request, as_json(body))  # a repeat draws another seed
        return await self._submit_creation(CREATE, model, self._creating(model), submitted)

    def _creating(self, model: Model) -> Work:
        async def work() -> Outcome:
            return await self._create(model)

        return work

    async def _create(self, model: Model) -> Outcome:
        name = self._catalog.backend_name(model.base_model)
        await self._backend.create_model(model.model_id, name, lora_spec(model.lora))
        return completed_json(created(model.model_id))

    async def _resumed_creation(self, ticket: Ticket, request: bytes) -> Work:
        return self._creating(await self.of(ticket))

    async def load(self, user: str, body: LoadWeightsRequest) -> UntypedAPIFuture:
        """Create a model from a checkpoint, or (legacy) put a checkpoint into a model."""
        if body.session_id is not None and body.model_seq_id is not None:
            return await self._create_from_checkpoint(
                user, body, body.session_id, body.model_seq_id
            )
        if body.model_id is None:
            raise InvalidRequest("load_weights needs session_id and model_seq_id, or model_id")
        model = await self.require(user, body.model_id)
        owner = self._checkpoints.owner_of(body.weights_access_token)
        # The token is a key: whose it is goes on record in its place.
        loading = Loading(body.model_copy(update={"weights_access_token": None}), owner)
        work = self._loading(model, loading)
        return await self.submit(model, LOAD, body.seq_id, work, Submitted.of(loading.encoded()))

    def _loading(self, model: Model, loading: Loading) -> Work:
        async def work() -> Outcome:
            outcome = await self._loader.load(model, loading)
            self._changed(model.user, model.model_id)  # read again, with its new record
            return outcome

        return work

    async def _resumed_loading(self, ticket: Ticket, request: bytes) -> Work:
        return self._loading(await self.of(ticket), Loading.decoded(request))

    async def _create_from_checkpoint(
        self, user: str, body: LoadWeightsRequest, session_id: str, model_seq_id: int
    ) -> UntypedAPIFuture:
        await self._sessions.require_open(user, session_id)
        check_optimizer(body.optimizer_config)
        owner = self._checkpoints.owner_of(body.weights_access_token)
        nearby = Nearby(session_id=session_id)
        checkpoint = await self._loader.find(user, body.path, nearby, owner)
        base_model = self._catalog.get(body.base_model or checkpoint.base_model).name
        model = new_model(user, session_id, model_seq_id, base_model, checkpoint.lora)
        model = with_metadata(model, body.user_metadata)

        resolved = {"path": checkpoint.tinker_path, "weights_access_token": None}
        loading = Loading(body.model_copy(update=resolved), owner)
        submitted = Submitted.of(loading.encoded(), as_json(body))
        return await self._submit_creation(LOAD, model, self._loading(model, loading), submitted)

    async def _submit_creation(
        self, kind: str, model: Model, work: Work, submitted: Submitted
    ) -> UntypedAPIFuture:
        """Number 0 of the model's lane."""
        async with self._one_at_a_time:
            await self._quotas.require_model(model, self._training_bytes)
            # Before the acknowledgement: the client may post operation 1 as soon as it has that.
            await self._metadata.put_model(model)
        key = create_key(model.user, model.model_id)
        ticket = Ticket(model.user, kind, key, model.model_id, 0, digest=submitted.digest)
        kept = submitted.request if self._recovery.is_offered else None
        request_id = await self._tasks.submit_in_lane(ticket, work, kept)
        return UntypedAPIFuture(request_id=request_id, model_id=model.model_id)

    def _training_bytes(self, model: Model) -> int:
        if model.base_model not in self._catalog.names:  # of an earlier run: it is in no memory
            return 0
        return self._catalog.get(model.base_model).training_bytes(lora_spec(model.lora))

    def _forget_failed(self, pending: Pending) -> None:
        """When its creation fails there is no such model, by its record."""
        ticket, outcome = pending.ticket, pending.outcome
        assert outcome is not None
        if ticket.creates_model and outcome.status == "failed":
            assert ticket.model_id is not None
            self._changed(ticket.user, ticket.model_id)
            self._recovery.gone((ticket.user, ticket.model_id))

    async def freed(self) -> None:
        """Until what models leave that were deleted so far is gone."""
        while self._freeing:
            await asyncio.wait(self._freeing)

    # use

    async def find(self, user: str, model_id: str) -> Model | None:
        """A model that takes requests: not deleted, not failed, its session open."""
        model = self._live.get((user, model_id))
        if model is None:
            num_changes = self._num_changes
            model = await self._metadata.model(model_id, user)
            if model is None or model.state != "live":
                return None
            if num_changes == self._num_changes:  # else it may be deleted by now
                self._live[user, model_id] = model
        return model

    def _changed(self, user: str, model_id: str) -> None:
        """Its record has changed: it is read again."""
        self._num_changes += 1
        self._live.pop((user, model_id), None)

    async def require(self, user: str, model_id: str) -> Model:
        """Raises ModelNotFound."""
        model = await self.find(user, model_id)
        if model is None:
            raise ModelNotFound(model_id)
        return model

    async def of(self, ticket: Ticket) -> Model:
        """The model of an operation that was acknowledged, whatever has become of it."""
        assert ticket.model_id is not None
        return await self._model(ticket.user, ticket.model_id)

    async def _model(self, user: str, model_id: str) -> Model:
        model = await self._metadata.model(model_id, user)
        if model is None:
            raise ModelNotFound(model_id)
        return model

    def resumed(self, body_type: type[Body], work_of: Callable[[Model, Body], Work]) -> Resume:
        """How an operation whose request is a body as JSON begins again."""

        async def resume(ticket: Ticket, request: bytes) -> Work:
            return work_of(await self.of(ticket), body_type.model_validate_json(request))

        return resume

    async def submit(
        self, model: Model, kind: str, seq_id: int | None, work: Work, submitted: Submitted
    ) -> UntypedAPIFuture:
        """Put an operation in the model's lane.

        Another operation with this number is acknowledged and fails: clients hang when a chunk is
        refused (wire specification, section 0)."""
        seq_id = train_seq_id(seq_id)
        key = train_key(model.user, model.model_id, seq_id)
        ticket = Ticket(
            *(model.user, kind, key, model.model_id, seq_id),
            digest=submitted.digest,
            num_tokens=submitted.num_tokens,
        )
        kept = submitted.request if self._recovery.is_offered else None
        try:
            request_id = await self._tasks.submit_in_lane(ticket, work, kept)
        except NumberTaken as error:
            request_id = await self._tasks.refuse(Ticket(model.user, kind), error)
        self._touch(model.model_id)
        return UntypedAPIFuture(request_id=request_id, model_id=model.model_id)

    def _touch(self, model_id: str) -> None:
        now = time.monotonic()
        if now - self._touched.get(model_id, float("-inf")) > TOUCH_EVERY_S:
            self._touched[model_id] = now
            self._tasks.spawn(self._metadata.touch_model(model_id), f"touch {model_id}")

    async def get_info(self, user: str, model_id: str, *, local: bool) -> GetInfoResponse:
        """local: whether the client reads this machine's files."""
        model = await self.require(user, model_id)
        served = self._catalog.get(model.base_model)
        tokenizer = self._catalog.tokenizer_id(served.name, local=local)
        return GetInfoResponse(
            model_id=model_id,
            model_data=ModelData(
                arch=served.architecture, model_name=served.name, tokenizer_id=tokenizer
            ),
            is_lora=model.lora.rank > 0,
            lora_rank=model.lora.rank,
            model_name=served.name,
        )

    async def delete(self, user: str, model_id: str) -> None:
        """Free the weights once the queued operations are done; checkpoints stay."""
        model = await self.require(user, model_id)
        await self._retire(model)

    async def unload(self, user: str, model_id: str) -> UntypedAPIFuture:
        """`delete` with a result that comes when the weights are freed: the form of older SDKs.

        Sent again it is the same request, though the model is gone by then.
        """
        model = await self._metadata.model(model_id, user)
        if model is None or model.state == "failed":
            raise ModelNotFound(model_id)
        if model.state == "live":
            await self._close(model)
        ticket = Ticket(user, UNLOAD, unload_key(user, model_id))
        work, kept = self._unloading(user, model_id), model_id.encode()
        request_id = await self._tasks.submit(ticket, work, kept)
        return UntypedAPIFuture(request_id=request_id, model_id=model_id)

    async def _resumed_unloading(self, ticket: Ticket, kept: bytes) -> Work:
        return self._unloading(ticket.user, kept.decode())

    def _unloading(self, user: str, model_id: str) -> Work:
        async def work() -> Outcome:
            await self._free(user, model_id)
            return completed_json({"model_id": model_id, "type": "unload_model"})

        return work

    async def _retire_session(self, user: str, session_id: str) -> None:
        for model in await self._metadata.models_of_session(session_id, user):
            if model.state == "live":
                await self._retire(model)
            else:  # nothing samples what it published now; operations may still be queued
                self._spawn_free(model)

    async def _retire(self, model: Model) -> None:
        await self._close(model)
        self._spawn_free(model)

    def _spawn_free(self, model: Model) -> None:
        task = self._tasks.spawn(self._free(model.user, model.model_id), f"free {model.model_id}")
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)

    async def _close(self, model: Model) -> None:
        """No request enters the lane from now on; what is queued there still runs."""
        await self._metadata.set_model_state(model.model_id, "deleted")
        self._changed(model.user, model.model_id)
        self._touched.pop(model.model_id, None)

    async def _free(self, user: str, model_id: str) -> None:
        lanes = self._tasks.lanes
        if not await lanes.drained(user, model_id):
            return  # at the next start, after what is left
        # What has ended in memory only runs again after a crash: on what is kept of its model.
        await self._tasks.outcomes.recorded()
        async with lanes.between_operations(user, model_id):  # nor is it just brought back
            with suppress(EngineDied):  # with all that it had in memory
                await self._backend.delete_model(model_id)
            self._recovery.deleted((user, model_id))
            self._on_policy.changed(model_id)
            if not await self._metadata.is_sampled(user, model_id):
                await self._recovery.end_run(user, model_id)
        lanes.forget(user, model_id)
