"""Training: everything that runs in a model's lane after its creation."""

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tinker_gmi.types import (
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    UntypedAPIFuture,
)
from tinkercloud.core.operation_codec import decode_batch, encode_batch, encode_fault
from tinkercloud.core.pending import Work
from tinkercloud.core.provenance import sequence_ids
from tinkercloud.core.types import RecordedSequence, TrainBatch
from tinkercloud.errors import InvalidRequest, ModelNotFound, TinkercloudError, UserError
from tinkercloud.losses import LOSSES
from tinkercloud.losses.custom.graph import CUSTOM
from tinkercloud.services.checkpoints import age_encryption
from tinkercloud.services.checkpoints.checkpoint_writer import SaveOptions
from tinkercloud.services.checkpoints.external_files import write_export
from tinkercloud.services.common.bodies import TrainingCall
from tinkercloud.services.common.numbers import train_key, train_seq_id
from tinkercloud.services.common.user_metadata import accepted
from tinkercloud.services.models.dependencies import Dependencies
from tinkercloud.services.models.model_service import ModelService
from tinkercloud.services.models.sampling_service import SamplingService
from tinkercloud.services.recovery.lane_operations import (
    FORWARD_BACKWARD,
    OPTIM_STEP,
    PUBLISH,
    Submitted,
    as_json,
    changes_if_completed,
    never,
    refusal,
)
from tinkercloud.services.recovery.training_outcomes import (
    adam_params,
    computed_by_pass,
    computed_by_step,
    with_all_params,
)
from tinkercloud.storage.futures import Outcome, Ticket, completed_json, completed_protobuf, failed
from tinkercloud.storage.metadata import Model

FORWARD, SAVE, EXPORT = "Forward", "SaveWeights", "SaveWeightsExternal"
INLINE_BYTES = 64 * 1024  # larger batches are checked off the event loop


class TrainingService:
    def __init__(self, dependencies: Dependencies, models: ModelService, sampling: SamplingService):
        self._backend = dependencies.backend
        self._catalog = dependencies.catalog
        self._tasks = dependencies.tasks
        self._checkpoints = dependencies.checkpoints
        self._records = dependencies.sample_records
        self._usage = dependencies.usage
        self._losses = dependencies.losses
        self._quotas = dependencies.quotas
        self._on_policy = dependencies.on_policy
        self._models = models
        self._sampling = sampling
        self._put_in_journal()

    def _put_in_journal(self) -> None:
        """How each kind of operation begins again."""
        tasks, models = self._tasks, self._models
        tasks.journal(FORWARD, self._resumed_pass, never)
        tasks.journal(FORWARD_BACKWARD, self._resumed_pass, changes_if_completed)
        tasks.journal(OPTIM_STEP, models.resumed(OptimStepRequest, self._stepping), _steps)
        tasks.journal(SAVE, models.resumed(SaveWeightsRequest, self._saving), never)
        tasks.journal(EXPORT, models.resumed(SaveWeightsExternalRequest, self._exporting), never)
        publishing = models.resumed(SaveWeightsForSamplerRequest, self._publishing)
        tasks.journal(PUBLISH, publishing, _publishes)

    # passes

    async def forward_backward(self, user: str, call: TrainingCall) -> UntypedAPIFuture:
        """Acknowledged even when it must fail: a refused chunk would hang its client for ever (wire
        specification, section 0).

        Raises UserError for faulty data of an unknown model: then nobody can be waiting.
        """
        kind = FORWARD if call.raw.forward_only else FORWARD_BACKWARD
        model = await self._models.find(user, call.model_id)
        if model is None:
            return await self._refuse(user, kind, call)
        if call.raw.num_bytes <= INLINE_BYTES:
            digest = call.raw.digest()
        else:
            digest = await asyncio.to_thread(call.raw.digest)
        try:
            batch = await self._checked(model, call)
        except TinkercloudError as error:
            return await self._models.submit(
                model, kind, call.seq_id, refusal(error), Submitted(encode_fault(error), digest)
            )
        # On record is what was checked, not the raw form: that names what may be gone later.
        if call.raw.num_bytes <= INLINE_BYTES:
            request = encode_batch(batch)
        else:
            request = await asyncio.to_thread(encode_batch, batch)
        work = self._passing(model, batch)
        submitted = Submitted(request, digest, batch.num_tokens)
        return await self._models.submit(model, kind, call.seq_id, work, submitted)

    async def _refuse(self, user: str, kind: str, call: TrainingCall) -> UntypedAPIFuture:
        if call.fault is not None or not call.model_id:
            raise UserError(call.fault or "the request names no model_id")
        key = train_key(user, call.model_id, train_seq_id(call.seq_id))
        refused = ModelNotFound(call.model_id)
        request_id = await self._tasks.refuse(Ticket(user, kind, key), refused)
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

    def _passing(self, model: Model, batch: TrainBatch) -> Work:
        async def work() -> Outcome:
            shared = replace(batch, user=model.user)
            output = await self._backend.forward_backward(model.model_id, shared)
            self._usage.trained(model, batch)
            self._on_policy.trained(model.model_id, batch, output)
            return completed_protobuf(await computed_by_pass(batch, output))

        return work

    async def _resumed_pass(self, ticket: Ticket, request: bytes) -> Work:
        try:
            batch = decode_batch(request)
        except TinkercloudError as error:
            return refusal(error)
        return self._passing(await self._models.of(ticket), batch)

    # steps

    async def optim_step(self, user: str, body: OptimStepRequest) -> UntypedAPIFuture:
        model = await self._models.require(user, body.model_id)
        resolved = with_all_params(body)
        work = self._stepping(model, resolved)
        return await self._models.submit(
            model, OPTIM_STEP, body.seq_id, work, Submitted.of(as_json(resolved), as_json(body))
        )

    def _stepping(self, model: Model, body: OptimStepRequest) -> Work:
        async def work() -> Outcome:
            try:
                metrics = await self._backend.optim_step(model.model_id, adam_params(body))
            except UserError as error:  # a gradient that is not finite: it is dropped
                dropped = failed(str(error), error.category)
                return replace(dropped, computed=dropped.body)
            policy_metrics = self._on_policy.stepped(model.model_id)
            # NaN in a JSON result is a decode error in the client (wire specification, section 0)
            finite = {n: v for n, v in {**metrics, **policy_metrics}.items() if math.isfinite(v)}
            outcome = completed_json({"metrics": finite, "type": "optim_step"})
            return replace(outcome, computed=computed_by_step(metrics))

        return work

    # weights out

    async def save_weights(self, user: str, body: SaveWeightsRequest) -> UntypedAPIFuture:
        model = await self._models.require(user, body.model_id)
        work = self._saving(model, body)
        return await self._models.submit(
            model, SAVE, body.seq_id, work, Submitted.of(as_json(body))
        )

    def _saving(self, model: Model, body: SaveWeightsRequest) -> Work:
        max_user_bytes = self._quotas.checkpoint_bytes()

        async def work() -> Outcome:
            if body.path is None:
                raise InvalidRequest("save_weights needs a name in `path`")
            options = SaveOptions(
                "weights",
                body.path,
                with_optimizer=True,
                ttl_s=body.ttl_seconds,
                overwrite=body.overwrite,
                user_metadata=accepted(body.user_metadata),
                request_id=self._tasks.running_request_id(),
                max_user_bytes=max_user_bytes,
            )
            checkpoint = await self._checkpoints.save(model, options)
            return completed_json({"path": checkpoint.tinker_path, "type": "save_weights"})

        return work

    async def save_weights_external(
        self, user: str, body: SaveWeightsExternalRequest
    ) -> UntypedAPIFuture:
        """Files for other programs, as `external_files` has them; encrypted where recipients are
        named."""
        model = await self._models.require(user, body.model_id)
        work = self._exporting(model, body)
        kept = as_json(body)
        try:
            age_encryption.recipients_of(body.age_encryption_recipients or ())
        except InvalidRequest:  # what is no recipient may be a secret: it is not kept
            kept = as_json(body.model_copy(update={"age_encryption_recipients": ["(refused)"]}))
        return await self._models.submit(model, EXPORT, body.seq_id, work, Submitted.of(kept))

    def _exporting(self, model: Model, body: SaveWeightsExternalRequest) -> Work:
        max_user_bytes = self._quotas.checkpoint_bytes()

        async def work() -> Outcome:
            recipients = age_encryption.recipients_of(body.age_encryption_recipients or ())
            served = self._catalog.get(model.base_model)

            def convert(source: Path, target: Path) -> None:
                write_export(source, target, served)
                age_encryption.encrypt_files(target, recipients)

            options = SaveOptions(
                *("external_weights", body.path),
                ttl_s=body.ttl_seconds,
                request_id=self._tasks.running_request_id(),
                max_user_bytes=max_user_bytes,
            )
            checkpoint = await self._checkpoints.save(model, options, convert)
            return completed_json(
                {
                    "path": checkpoint.tinker_path,
                    "size_bytes": checkpoint.size_bytes,
                    "type": "save_weights_external",
                }
            )

        return work

    async def save_weights_for_sampler(
        self, user: str, body: SaveWeightsForSamplerRequest
    ) -> UntypedAPIFuture:
        """Named: a checkpoint. Ephemeral: a sampling session in one step."""
        model = await self._models.require(user, body.model_id)
        work = self._publishing(model, body)
        return await self._models.submit(
            model, PUBLISH, body.seq_id, work, Submitted.of(as_json(body), _publication_sent(body))
        )

    def _publishing(self, model: Model, body: SaveWeightsForSamplerRequest) -> Work:
        max_user_bytes = self._quotas.checkpoint_bytes()

        async def work() -> Outcome:
            result: dict[str, object] = {"type": "save_weights_for_sampler"}
            if body.path is not None:
                options = SaveOptions(
                    *("sampler_weights", body.path),
                    ttl_s=body.ttl_seconds,
                    user_metadata=accepted(body.user_metadata),
                    request_id=self._tasks.running_request_id(),
                    max_user_bytes=max_user_bytes,
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
            return replace(completed_json(result), computed=b"")

        return work


def _publication_sent(body: SaveWeightsForSamplerRequest) -> bytes:
    """What makes a repeated save the same request. The official client counts a new
    `sampling_session_seq_id` at each try of one save; the sampler is that of the first."""
    counted = body.sampling_session_seq_id is not None
    return as_json(body.model_copy(update={"sampling_session_seq_id": 0 if counted else None}))


def _steps(ticket: Ticket, outcome: Outcome) -> bool:
    """Also where the gradient was dropped; not where there was no model."""
    return outcome.computed is not None


def _publishes(ticket: Ticket, outcome: Outcome) -> bool:
    return outcome.status == "completed" and "sampling_session_id" in json.loads(outcome.body)
