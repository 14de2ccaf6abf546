"""Training: everything that runs in a model's lane after its creation."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from pydantic import ValidationError

from tinker_gmi.types import AdamParams as JsonAdamParams
from tinker_gmi.types import (
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    UntypedAPIFuture,
)
from tinkercloud.core.custom_batch import with_custom_metrics
from tinkercloud.core.policy_metrics import policy_metrics
from tinkercloud.core.provenance import sequence_ids
from tinkercloud.core.types import AdamParams, RecordedSequence, TrainBatch, TrainOutput
from tinkercloud.errors import InvalidRequest, ModelNotFound, UserError
from tinkercloud.losses import LOSSES
from tinkercloud.losses.custom.graph import CUSTOM
from tinkercloud.services.checkpoints import age_encryption
from tinkercloud.services.checkpoints.checkpoint_writer import SaveOptions
from tinkercloud.services.checkpoints.external_files import write_export
from tinkercloud.services.common.bodies import TrainingCall
from tinkercloud.services.common.numbers import train_key, train_seq_id
from tinkercloud.services.common.user_metadata import stringified
from tinkercloud.services.models.dependencies import Dependencies
from tinkercloud.services.models.model_service import ModelService
from tinkercloud.services.models.sampling_service import SamplingService
from tinkercloud.storage.futures import Outcome, Ticket, completed_json, completed_protobuf
from tinkercloud.storage.metadata import Model
from tinkercloud.wire.codec import encode_train_output

INLINE_BYTES = 64 * 1024  # larger batches are checked off the event loop
INLINE_DATUMS = 64  # results of more are encoded off the event loop


class TrainingService:
    def __init__(self, dependencies: Dependencies, models: ModelService, sampling: SamplingService):
        self._backend = dependencies.backend
        self._catalog = dependencies.catalog
        self._tasks = dependencies.tasks
        self._checkpoints = dependencies.checkpoints
        self._records = dependencies.sample_records
        self._usage = dependencies.usage
        self._losses = dependencies.losses
        self._on_policy = dependencies.on_policy
        self._models = models
        self._sampling = sampling

    async def forward_backward(self, user: str, call: TrainingCall) -> UntypedAPIFuture:
        """Acknowledged even when it must fail: a refused chunk would hang its client for ever (wire
        specification, section 0).

        Raises UserError for faulty data of an unknown model: then nobody can be waiting.
        """
        kind = "Forward" if call.raw.forward_only else "ForwardBackward"
        model = await self._models.find(user, call.model_id)
        if model is None:
            return await self._refuse(user, kind, call)

        # Checked while the row is written. The task holds the batch from then on, not the raw form.
        batch_task = asyncio.ensure_future(self._checked(model, call))
        # retrieves the error: of a repeated request nobody awaits the batch
        batch_task.add_done_callback(lambda done: done.cancelled() or done.exception())

        async def work() -> Outcome:
            batch = await batch_task
            output = await self._backend.forward_backward(model.model_id, batch)
            self._usage.trained(model, batch)
            self._on_policy.trained(model.model_id, batch, output)
            if len(batch.data) <= INLINE_DATUMS:
                return completed_protobuf(_encoded(batch, output))
            return completed_protobuf(await asyncio.to_thread(_encoded, batch, output))

        return await self._models.submit(model, kind, call.seq_id, work)

    async def _refuse(self, user: str, kind: str, call: TrainingCall) -> UntypedAPIFuture:
        if call.fault is not None or not call.model_id:
            raise UserError(call.fault or "the request names no model_id")

        async def work() -> Outcome:
            raise ModelNotFound(call.model_id)

        key = train_key(user, call.model_id, train_seq_id(call.seq_id))
        request_id = await self._tasks.submit(Ticket(user, kind, key), work)
        return UntypedAPIFuture(request_id=request_id, model_id=call.model_id)

    async def _checked(self, model: Model, call: TrainingCall) -> TrainBatch:
        raw = call.raw
        if call.fault is not None:
            raise InvalidRequest(call.fault)
        converter = self._catalog.converter(model.base_model)
        if raw.loss_fn == CUSTOM:
            return await self._losses.batch(model, converter, raw)
        records: Mapping[str, RecordedSequence] = {}
        if raw.loss_fn in LOSSES and LOSSES[raw.loss_fn].needs_provenance:
            records = await self._records.of(model, sequence_ids(raw.data))
        if raw.num_bytes <= INLINE_BYTES:
            return converter.train_batch(raw, records)
        return await asyncio.to_thread(converter.train_batch, raw, records)

    async def optim_step(self, user: str, body: OptimStepRequest) -> UntypedAPIFuture:
        model = await self._models.require(user, body.model_id)

        async def work() -> Outcome:
            metrics = await self._backend.optim_step(model.model_id, adam_params(body))
            metrics = {**metrics, **self._on_policy.stepped(model.model_id)}
            # NaN in a JSON result is a decode error in the client (wire specification, section 0)
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            return completed_json({"metrics": finite, "type": "optim_step"})

        return await self._models.submit(model, "OptimStep", body.seq_id, work)

    async def save_weights(self, user: str, body: SaveWeightsRequest) -> UntypedAPIFuture:
        model = await self._models.require(user, body.model_id)

        async def work() -> Outcome:
            if body.path is None:
                raise InvalidRequest("save_weights needs a name in `path`")
            options = SaveOptions(
                "weights",
                body.path,
                with_optimizer=True,
                ttl_s=body.ttl_seconds,
                overwrite=body.overwrite,
                user_metadata=stringified(body.user_metadata),
            )
            checkpoint = await self._checkpoints.save(model, options)
            return completed_json({"path": checkpoint.tinker_path, "type": "save_weights"})

        return await self._models.submit(model, "SaveWeights", body.seq_id, work)

    async def save_weights_external(
        self, user: str, body: SaveWeightsExternalRequest
    ) -> UntypedAPIFuture:
        """Files for other programs, as `external_files` has them; encrypted where recipients are
        named."""
        model = await self._models.require(user, body.model_id)

        async def work() -> Outcome:
            recipients = age_encryption.recipients_of(body.age_encryption_recipients or ())
            served = self._catalog.get(model.base_model)

            def convert(source: Path, target: Path) -> None:
                write_export(source, target, served)
                age_encryption.encrypt_files(target, recipients)

            options = SaveOptions("external_weights", body.path, ttl_s=body.ttl_seconds)
            checkpoint = await self._checkpoints.save(model, options, convert)
            return completed_json(
                {
                    "path": checkpoint.tinker_path,
                    "size_bytes": checkpoint.size_bytes,
                    "type": "save_weights_external",
                }
            )

        return await self._models.submit(model, "SaveWeightsExternal", body.seq_id, work)

    async def save_weights_for_sampler(
        self, user: str, body: SaveWeightsForSamplerRequest
    ) -> UntypedAPIFuture:
        """Named: a checkpoint. Ephemeral: a sampling session in one step."""
        model = await self._models.require(user, body.model_id)

        async def work() -> Outcome:
            result: dict[str, object] = {"type": "save_weights_for_sampler"}
            if body.path is not None:
                metadata = stringified(body.user_metadata)
                options = SaveOptions(
                    "sampler_weights", body.path, ttl_s=body.ttl_seconds, user_metadata=metadata
                )
                checkpoint = await self._checkpoints.save(model, options)
                self._on_policy.published(model.model_id, checkpoint.directory)
                result["path"] = checkpoint.tinker_path
            elif body.sampling_session_seq_id is not None:
                result["sampling_session_id"] = await self._sampling.publish_model(
                    model, body.sampling_session_seq_id, body.kind
                )
            else:
                raise InvalidRequest(
                    "save_weights_for_sampler needs `path` or `sampling_session_seq_id`"
                )
            return completed_json(result)

        return await self._models.submit(model, "SaveWeightsForSampler", body.seq_id, work)


def _encoded(batch: TrainBatch, output: TrainOutput) -> bytes:
    """With the metrics of RL: here, from what every backend returns, they are the same on all."""
    if batch.loss_fn == CUSTOM:
        return encode_train_output(with_custom_metrics(output))
    pairs = zip(output.outputs, batch.data, strict=True)
    data = ((fields["logprobs"], datum.inputs) for fields, datum in pairs)
    metrics = policy_metrics(batch.loss_fn, batch.loss_fn_config, data)
    return encode_train_output(TrainOutput(output.outputs, {**output.metrics, **metrics}))


def adam_params(body: OptimStepRequest) -> AdamParams:
    """`optimizer_params` replaces `adam_params` (wire specification, section 8). Raises
    InvalidRequest."""
    wire_params = body.adam_params or JsonAdamParams()
    if body.optimizer_params is not None:
        family = body.optimizer_params.get("type", "adamw")
        if family == "dimuon":
            raise InvalidRequest(
                "optimizer_params of 'dimuon': its definition is not published, and this model was "
                "made with adamw; step with AdamParams"
            )
        if family not in ("adam", "adamw"):
            raise InvalidRequest(f"optimizer {family!r} in optimizer_params: this model has adamw")
        try:
            wire_params = JsonAdamParams.model_validate(body.optimizer_params)
        except ValidationError as error:
            raise InvalidRequest(f"optimizer_params: {error.errors()[0]['msg']}") from None
    params = AdamParams(**wire_params.model_dump())
    for name, value in asdict(params).items():
        highest = 1.0 if name in ("beta1", "beta2") else math.inf
        if not 0 <= value < highest:
            raise InvalidRequest(f"adam_params.{name} is {value}; it must lie in [0, {highest})")
    return params
