"""Operations of models in training, done again from what is on record of them."""

import json
from dataclasses import replace
from pathlib import Path

from tinker_gmi.types import OptimStepRequest
from tinkercloud.backends.base import Backend
from tinkercloud.core.operation_codec import decode_batch
from tinkercloud.errors import UserError
from tinkercloud.services.recovery.lane_operations import (
    CREATE,
    FORWARD_BACKWARD,
    LOAD,
    OPTIM_STEP,
    PUBLISH,
    Loading,
)
from tinkercloud.services.recovery.model_records import lora_spec
from tinkercloud.services.recovery.training_outcomes import (
    adam_params,
    computed_by_pass,
    computed_by_step,
)
from tinkercloud.storage.futures import completed_json, failed
from tinkercloud.storage.journal import RanOperation
from tinkercloud.storage.metadata import LoraRecord


def created(model_id: str) -> dict[str, object]:
    """What a client gets for a new model."""
    return {"model_id": model_id, "type": "create_model"}


def loaded(path: str, model_id: str) -> dict[str, object]:
    """What a client gets for a checkpoint that is in a model now."""
    return {"path": path, "model_id": model_id, "type": "load_weights"}


class Replayer:
    def __init__(self, backend: Backend):
        self._backend = backend

    async def do(self, operation: RanOperation, base_model: str, loaded: Path) -> bytes:
        """Do an operation again on its model, and nothing else; what it computed, of which the
        journal has the digest. Nothing is computed where weights are published.

        base_model: as the backend names it. loaded: the folder of the checkpoint that the operation
        loaded, if it did.
        """
        if operation.kind == CREATE:
            return await self._create(operation, base_model)
        if operation.kind == LOAD:
            body = Loading.decoded(operation.request).body
            await self._backend.load_model(
                operation.model_id, base_model, loaded, with_optimizer=body.optimizer
            )
            return b""
        if operation.kind == FORWARD_BACKWARD:
            batch = replace(decode_batch(operation.request), user=operation.user)
            output = await self._backend.forward_backward(operation.model_id, batch)
            return await computed_by_pass(batch, output)
        if operation.kind == OPTIM_STEP:
            return await self._step(operation)
        assert operation.kind == PUBLISH, operation.kind
        return b""

    async def _create(self, operation: RanOperation, base_model: str) -> bytes:
        # On record and not as the model has it now: a checkpoint may have been loaded since.
        lora = LoraRecord(**json.loads(operation.request))
        await self._backend.create_model(operation.model_id, base_model, lora_spec(lora))
        return completed_json(created(operation.model_id)).body

    async def _step(self, operation: RanOperation) -> bytes:
        body = OptimStepRequest.model_validate_json(operation.request)
        try:
            metrics = await self._backend.optim_step(operation.model_id, adam_params(body))
        except UserError as error:  # a gradient that is not finite was dropped, and is again
            return failed(str(error), error.category).body
        return computed_by_step(metrics)
