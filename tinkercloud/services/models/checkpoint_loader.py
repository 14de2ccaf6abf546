"""Checkpoints into models: found, checked, kept for recovery, and read by the backend."""

from dataclasses import replace

from tinkercloud.errors import InvalidRequest, TinkercloudError
from tinkercloud.services.checkpoints.checkpoint_names import Nearby
from tinkercloud.services.models.dependencies import Dependencies
from tinkercloud.services.recovery.lane_operations import Loading
from tinkercloud.services.recovery.replayer import loaded
from tinkercloud.storage.futures import Outcome, completed_json
from tinkercloud.storage.metadata import Checkpoint, LoraRecord, Model


class CheckpointLoader:
    def __init__(self, dependencies: Dependencies):
        self._backend = dependencies.backend
        self._catalog = dependencies.catalog
        self._metadata = dependencies.metadata
        self._tasks = dependencies.tasks
        self._checkpoints = dependencies.checkpoints
        self._on_policy = dependencies.on_policy
        self._files = dependencies.recovery_files
        self._recovery = dependencies.recovery

    async def find(self, user: str, path: str, nearby: Nearby, owner: str | None) -> Checkpoint:
        """One that this user may load. owner: as in Loading."""
        path = await self._checkpoints.full_path(user, path, nearby)
        return await self._checkpoints.loadable(user, path, owner)

    async def load(self, model: Model, loading: Loading) -> Outcome:
        """In the model's lane: a save of this name may have been posted just before."""
        body = loading.body
        nearby = Nearby(model.model_id, model.session_id)
        checkpoint = await self.find(model.user, body.path, nearby, loading.owner)
        try:
            await self._load_into(model, checkpoint, with_optimizer=body.optimizer)
        except (OSError, TinkercloudError):
            # Where it was deleted meanwhile, that is what is said.
            await self.find(model.user, body.path, nearby, loading.owner)
            raise
        result = loaded(checkpoint.tinker_path, model.model_id)
        return replace(completed_json(result), computed=b"")

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
