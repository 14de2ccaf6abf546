"""Models: a tenant's fine-tunes, from creation to deletion."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
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
from tinkercloud.core.pending import Resume, Work
from tinkercloud.errors import (
    EngineDied,
    InvalidRequest,
    ModelNotFound,
    ModelStateLost,
    ServerFault,
    TinkercloudError,
)
from tinkercloud.services.checkpoints.checkpoint_names import Nearby
from tinkercloud.services.common.numbers import (
    create_key,
    train_key,
    train_seq_id,
    unload_key,
)
from tinkercloud.services.models.dependencies import Dependencies
from tinkercloud.services.models.lane_operations import CREATE, LOAD, Loading, changes_if_completed
from tinkercloud.services.models.model_records import (
    check_optimizer,
    lora_record,
    lora_spec,
    new_model,
    with_metadata,
)
from tinkercloud.services.models.replayer import created
from tinkercloud.storage.futures import Outcome, Ticket, completed_json
from tinkercloud.storage.metadata import Checkpoint, LoraRecord, Model

UNLOAD = "UnloadModel"
TOUCH_EVERY_S = 10.0
RECENT_S = 3600.0
"""Models that were used so long before a start are brought back before they are asked for."""
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
        self._files = dependencies.recovery_files
        self._recovery = dependencies.recovery
        self._live: dict[tuple[str, str], Model] = {}
        self._touched: dict[str, float] = {}
        self._freeing: set[asyncio.Task[None]] = set()
        self._sessions.when_finished(self._retire_session)
        self._tasks.resume(UNLOAD, self._resumed_unloading)
        self._tasks.journal(CREATE, self._resumed_creation, changes_if_completed)
        self._tasks.journal(LOAD, self._resumed_loading, changes_if_completed)

    async def start(self) -> None:
        """Bring back, one after the other, what was trained until the last process ended: an
        operation that comes earlier does so itself."""
        if not self._recovery.is_offered:
            return
        kept = [
            m for name in await self._recovery.models() if (m := await self._metadata.model(*name))
        ]
        gone = [m for m in kept if await self._is_gone(m)]
        for model in gone:
            self._spawn_free(model)
        recent = time.time() - RECENT_S
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
        return await self._submit_creation(CREATE, model, self._creating(model), request)

    def _creating(self, model: Model) -> Work:
        async def work() -> Outcome:
            return await self._create(model)

        return self._guarded(model, work)

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
        return await self.submit(model, LOAD, body.seq_id, work, loading.encoded())

    def _loading(self, model: Model, loading: Loading) -> Work:
        body = loading.body

        async def work() -> Outcome:
            # In the lane: a save of this name may have been posted just before.
            nearby = Nearby(model.model_id, model.session_id)
            checkpoint = await self._loadable(model.user, body.path, nearby, loading.owner)
            try:
                await self._load_into(model, checkpoint, with_optimizer=body.optimizer)
            except (OSError, ServerFault):
                # Where it was deleted meanwhile, that is what is said.
                await self._loadable(model.user, body.path, nearby, loading.owner)
                raise
            return replace(_loaded(checkpoint.tinker_path, model.model_id), computed=b"")

        return work

    async def _resumed_loading(self, ticket: Ticket, request: bytes) -> Work:
        loading, model = Loading.decoded(request), await self.of(ticket)
        work = self._loading(model, loading)
        return self._guarded(model, work) if loading.creates else work

    async def _loadable(
        self, user: str, path: str, nearby: Nearby, owner: str | None
    ) -> Checkpoint:
        path = await self._checkpoints.full_path(user, path, nearby)
        return await self._checkpoints.loadable(user, path, owner)

    async def _create_from_checkpoint(
        self, user: str, body: LoadWeightsRequest, session_id: str, model_seq_id: int
    ) -> UntypedAPIFuture:
        await self._sessions.require_open(user, session_id)
        check_optimizer(body.optimizer_config)
        owner = self._checkpoints.owner_of(body.weights_access_token)
        nearby = Nearby(session_id=session_id)
        checkpoint = await self._loadable(user, body.path, nearby, owner)
        base_model = self._catalog.get(body.base_model or checkpoint.base_model).name
        model = new_model(user, session_id, model_seq_id, base_model, checkpoint.lora)
        model = with_metadata(model, body.user_metadata)

        resolved = {"path": checkpoint.tinker_path, "weights_access_token": None}
        loading = Loading(body.model_copy(update=resolved), owner, creates=True)
        work = self._guarded(model, self._loading(model, loading))
        return await self._submit_creation(LOAD, model, work, loading.encoded())

    async def _load_into(
        self, model: Model, checkpoint: Checkpoint, *, with_optimizer: bool
    ) -> None:
        if with_optimizer and not checkpoint.with_optimizer:
            raise InvalidRequest(
                f"{checkpoint.tinker_path} has no optimizer state; load it without the optimizer"
            )
        directory = await self._checkpoints.verified(checkpoint)
        if self._recovery.is_offered:  # before the model is made of it: the checkpoint may go
            request_id = self._tasks.running_request_id()
            directory = await self._files.keep_loaded(model.model_id, request_id, directory)
        name = self._catalog.backend_name(model.base_model)
        lora = await self._backend.load_model(
            model.model_id, name, directory, with_optimizer=with_optimizer
        )
        self._on_policy.changed(model.model_id)
        record = LoraRecord(
            lora.rank, lora.seed, lora.train_attn, lora.train_mlp, lora.train_unembed
        )
        await self._metadata.set_model_lora(model.model_id, record)
        self._live.pop((model.user, model.model_id), None)  # read again, with this record

    async def _submit_creation(
        self, kind: str, model: Model, work: Work, request: bytes
    ) -> UntypedAPIFuture:
        """Number 0 of the model's lane."""
        # Before the acknowledgement: the client may post operation 1 as soon as it has that.
        await self._metadata.put_model(model)
        ticket = Ticket(model.user, kind, create_key(model.user, model.model_id), model.model_id, 0)
        kept = request if self._recovery.is_offered else None
        request_id = await self._tasks.submit_in_lane(ticket, work, kept)
        return UntypedAPIFuture(request_id=request_id, model_id=model.model_id)

    def _guarded(self, model: Model, work: Work) -> Work:
        """When its creation fails there is no such model."""

        async def guarded() -> Outcome:
            try:
                return await work()
            except Exception as error:
                if self._recovery.is_offered and isinstance(error, EngineDied | ModelStateLost):
                    raise  # it is tried again
                self._live.pop((model.user, model.model_id), None)
                await self._metadata.set_model_state(model.model_id, "failed")
                raise

        return guarded

    async def freed(self) -> None:
        """Until what models leave that were deleted so far is gone."""
        while self._freeing:
            await asyncio.wait(self._freeing)

    # use

    async def find(self, user: str, model_id: str) -> Model | None:
        """A model that takes requests: not deleted, not failed, its session open."""
        model = self._live.get((user, model_id))
        if model is None:
            model = await self._metadata.model(model_id, user)
            if model is None or model.state != "live":
                return None
            self._live[user, model_id] = model
        return model

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
        self, model: Model, kind: str, seq_id: int | None, work: Work, request: bytes
    ) -> UntypedAPIFuture:
        """Put an operation in the model's lane. request: what makes its work again."""
        seq_id = train_seq_id(seq_id)
        key = train_key(model.user, model.model_id, seq_id)
        ticket = Ticket(model.user, kind, key, model.model_id, seq_id)
        kept = request if self._recovery.is_offered else None
        request_id = await self._tasks.submit_in_lane(ticket, work, kept)
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
        self._live.pop((model.user, model.model_id), None)
        self._touched.pop(model.model_id, None)

    async def _free(self, user: str, model_id: str) -> None:
        lanes = self._tasks.lanes
        if not await lanes.drained(user, model_id):
            return  # at the next start, after what is left
        async with lanes.between_operations(user, model_id):  # nor is it just brought back
            await self._backend.delete_model(model_id)
            self._on_policy.changed(model_id)
            if not await self._metadata.is_sampled(user, model_id):
                await self._recovery.end_run(user, model_id)
        lanes.forget(user, model_id)


def _loaded(path: str, model_id: str) -> Outcome:
    return completed_json({"path": path, "model_id": model_id, "type": "load_weights"})
