"""Models: a tenant's fine-tunes, from creation to deletion."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tinker_gmi.types import (
    CreateModelRequest,
    GetInfoResponse,
    LoadWeightsRequest,
    LoraConfig,
    ModelData,
    UntypedAPIFuture,
)
from tinkercloud.core.task_manager import Work
from tinkercloud.core.types import LoraSpec
from tinkercloud.errors import InvalidRequest, ModelNotFound
from tinkercloud.services.checkpoints.checkpoint_names import Nearby
from tinkercloud.services.common.numbers import (
    checked,
    create_key,
    train_key,
    train_seq_id,
    unload_key,
)
from tinkercloud.services.common.user_metadata import stringified
from tinkercloud.services.models.dependencies import Dependencies
from tinkercloud.storage.futures import Outcome, Ticket, completed_json
from tinkercloud.storage.metadata import Checkpoint, LoraRecord, Model

UNLOAD = "UnloadModel"
MAX_RANK = 1024
MAX_MODEL_SEQ_ID = 10**9
TOUCH_EVERY_S = 10.0


class ModelService:
    def __init__(self, dependencies: Dependencies):
        self._backend = dependencies.backend
        self._catalog = dependencies.catalog
        self._metadata = dependencies.metadata
        self._tasks = dependencies.tasks
        self._sessions = dependencies.sessions
        self._checkpoints = dependencies.checkpoints
        self._on_policy = dependencies.on_policy
        self._live: dict[tuple[str, str], Model] = {}
        self._touched: dict[str, float] = {}
        self._sessions.when_finished(self._retire_session)
        self._tasks.resume(UNLOAD, self._resumed_unloading)

    # creation

    async def create(self, user: str, body: CreateModelRequest) -> UntypedAPIFuture:
        await self._sessions.require_open(user, body.session_id)
        base_model = self._catalog.get(body.base_model).name
        _check_optimizer(body.optimizer_config)
        lora = _lora_record(body.lora_config or LoraConfig())
        model = _new_model(user, body.session_id, body.model_seq_id, base_model, lora)
        model = _with_metadata(model, body.user_metadata)

        async def work() -> Outcome:
            name = self._catalog.backend_name(base_model)
            await self._backend.create_model(model.model_id, name, lora_spec(lora))
            return completed_json({"model_id": model.model_id, "type": "create_model"})

        return await self._submit_creation("CreateModel", model, work)

    async def load(self, user: str, body: LoadWeightsRequest) -> UntypedAPIFuture:
        """Create a model from a checkpoint, or (legacy) put a checkpoint into a model."""
        if body.session_id is not None and body.model_seq_id is not None:
            return await self._create_from_checkpoint(
                user, body, body.session_id, body.model_seq_id
            )
        if body.model_id is None:
            raise InvalidRequest("load_weights needs session_id and model_seq_id, or model_id")
        model = await self.require(user, body.model_id)

        async def work() -> Outcome:
            # In the lane: a save of this name may have been posted just before.
            checkpoint = await self._loadable(user, body, Nearby(model.model_id, model.session_id))
            await self._load_into(model, checkpoint, body)
            return _loaded(checkpoint.tinker_path, model.model_id)

        return await self.submit(model, "LoadWeights", body.seq_id, work)

    async def _loadable(self, user: str, body: LoadWeightsRequest, nearby: Nearby) -> Checkpoint:
        path = await self._checkpoints.full_path(user, body.path, nearby)
        return await self._checkpoints.loadable(user, path, body.weights_access_token)

    async def _create_from_checkpoint(
        self, user: str, body: LoadWeightsRequest, session_id: str, model_seq_id: int
    ) -> UntypedAPIFuture:
        await self._sessions.require_open(user, session_id)
        _check_optimizer(body.optimizer_config)
        checkpoint = await self._loadable(user, body, Nearby(session_id=session_id))
        base_model = self._catalog.get(body.base_model or checkpoint.base_model).name
        model = _new_model(user, session_id, model_seq_id, base_model, checkpoint.lora)
        model = _with_metadata(model, body.user_metadata)

        async def work() -> Outcome:
            await self._load_into(model, checkpoint, body)
            return _loaded(checkpoint.tinker_path, model.model_id)

        return await self._submit_creation("LoadWeights", model, work)

    async def _load_into(
        self, model: Model, checkpoint: Checkpoint, body: LoadWeightsRequest
    ) -> None:
        if body.optimizer and not checkpoint.with_optimizer:
            raise InvalidRequest(
                f"{checkpoint.tinker_path} has no optimizer state; load it without the optimizer"
            )
        directory = await self._checkpoints.verified(checkpoint)
        name = self._catalog.backend_name(model.base_model)
        lora = await self._backend.load_model(
            model.model_id, name, directory, with_optimizer=body.optimizer
        )
        self._on_policy.changed(model.model_id)
        record = LoraRecord(
            lora.rank, lora.seed, lora.train_attn, lora.train_mlp, lora.train_unembed
        )
        await self._metadata.set_model_lora(model.model_id, record)
        self._live.pop((model.user, model.model_id), None)  # read again, with this record

    async def _submit_creation(self, kind: str, model: Model, work: Work) -> UntypedAPIFuture:
        """Number 0 of the model's lane; when it fails there is no such model."""
        # Before the acknowledgement: the client may post operation 1 as soon as it has that.
        await self._metadata.put_model(model)

        async def guarded() -> Outcome:
            try:
                return await work()
            except Exception:
                self._live.pop((model.user, model.model_id), None)
                await self._metadata.set_model_state(model.model_id, "failed")
                raise

        ticket = Ticket(model.user, kind, create_key(model.user, model.model_id), model.model_id, 0)
        request_id = await self._tasks.submit_in_lane(ticket, guarded)
        return UntypedAPIFuture(request_id=request_id, model_id=model.model_id)

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

    async def submit(
        self, model: Model, kind: str, seq_id: int | None, work: Work
    ) -> UntypedAPIFuture:
        """Put an operation in the model's lane."""
        seq_id = train_seq_id(seq_id)
        key = train_key(model.user, model.model_id, seq_id)
        ticket = Ticket(model.user, kind, key, model.model_id, seq_id)
        request_id = await self._tasks.submit_in_lane(ticket, work)
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

    async def _retire(self, model: Model) -> None:
        await self._close(model)
        self._tasks.spawn(self._free(model.user, model.model_id), f"free {model.model_id}")

    async def _close(self, model: Model) -> None:
        """No request enters the lane from now on; what is queued there still runs."""
        await self._metadata.set_model_state(model.model_id, "deleted")
        self._live.pop((model.user, model.model_id), None)
        self._touched.pop(model.model_id, None)

    async def _free(self, user: str, model_id: str) -> None:
        await self._tasks.drain(user, model_id)
        await self._backend.delete_model(model_id)
        self._on_policy.changed(model_id)


def _new_model(
    user: str, session_id: str, model_seq_id: int, base_model: str, lora: LoraRecord
) -> Model:
    checked("model_seq_id", model_seq_id, lowest=0, highest=MAX_MODEL_SEQ_ID)
    now = time.time()
    # A client that creates a model from a checkpoint computes this id itself (wire specification,
    # section 3.1).
    model_id = f"{session_id}:train:{model_seq_id}"
    return Model(model_id, user, session_id, base_model, lora, {}, now, now)


def _with_metadata(model: Model, user_metadata: Mapping[str, Any] | None) -> Model:
    return replace(model, user_metadata=stringified(user_metadata))


def _lora_record(config: LoraConfig) -> LoraRecord:
    checked("lora_config.rank", config.rank, lowest=0, highest=MAX_RANK)
    if not (config.train_attn or config.train_mlp or config.train_unembed):
        raise InvalidRequest("lora_config trains nothing; set at least one train_* to true")
    seed = secrets.randbits(63) if config.seed is None else config.seed % 2**63
    return LoraRecord(config.rank, seed, config.train_attn, config.train_mlp, config.train_unembed)


def lora_spec(lora: LoraRecord) -> LoraSpec:
    return LoraSpec(
        lora.rank,
        lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )


def _check_optimizer(config: Mapping[str, Any] | None) -> None:
    family = "adamw" if config is None else config.get("type", "adamw")
    if family == "dimuon":
        raise InvalidRequest(
            "optimizer 'dimuon' is not offered: its definition is not published; create the model "
            "with AdamOptimizerConfig(), the default, and step with AdamParams"
        )
    if family != "adamw":
        raise InvalidRequest(
            f"optimizer {str(family)[:100]!r} is not offered; this server trains with adamw"
        )


def _loaded(path: str, model_id: str) -> Outcome:
    return completed_json({"path": path, "model_id": model_id, "type": "load_weights"})
