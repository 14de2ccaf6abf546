"""What listings show: models as training runs, checkpoints with their paths."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

from tinker_gmi.types import (
    CHECKPOINT_SEGMENTS,
    CheckpointsListResponse,
    Cursor,
    TrainingRun,
    TrainingRunsResponse,
)
from tinker_gmi.types import Checkpoint as CheckpointView
from tinkercloud.errors import ModelNotFound
from tinkercloud.services.checkpoints.checkpoint_service import SCHEME, CheckpointService
from tinkercloud.storage.journal import JournalStorage
from tinkercloud.storage.metadata import Checkpoint, MetadataStorage, Model
from tinkercloud.storage.publications import PublicationStorage

MAX_LIMIT = 1000
ALL = -1  # SQLite's word for no limit
AccessScope = Literal["owned", "accessible"]
"""accessible: the caller's own, and what others have published."""
NOT_BIT_EXACT = "not_bit_exact_since"
"""In the metadata of a run that went on with another class of numerics, after a restart."""


@dataclass(frozen=True, slots=True)
class RunQuery:
    """project_id None: of all projects. everybody: what is accessible is every user's."""

    limit: int
    offset: int
    access_scope: AccessScope = "owned"
    project_id: str | None = None
    everybody: bool = False


class RestService:
    def __init__(
        self,
        metadata: MetadataStorage,
        checkpoints: CheckpointService,
        publications: PublicationStorage,
        journal: JournalStorage,
    ):
        self._metadata = metadata
        self._checkpoints = checkpoints
        self._publications = publications
        self._journal = journal

    async def training_runs(self, user: str, query: RunQuery) -> TrainingRunsResponse:
        limit, offset, project = query.limit, query.offset, query.project_id
        if query.access_scope == "owned" or project is not None:  # a project is its owner's own
            models = await self._metadata.models(user, limit, offset, project)
            total = await self._metadata.num_models(user, project)
        else:
            reader = None if query.everybody else user
            models = await self._publications.accessible_models(reader, limit, offset)
            total = await self._publications.num_accessible_models(reader)
        viewers = [model.user if query.everybody else user for model in models]
        views = [await self._run(*pair) for pair in zip(viewers, models, strict=True)]
        return TrainingRunsResponse(
            training_runs=views,
            cursor=Cursor(offset=offset, limit=limit, total_count=total),
        )

    async def training_run(
        self, user: str, run_id: str, access_scope: AccessScope = "owned"
    ) -> TrainingRun:
        if access_scope == "owned":
            model = await self._metadata.model(run_id, user)
        else:
            model = await self._publications.accessible_model(run_id, user)
        if model is None or model.state == "failed":
            raise ModelNotFound(run_id)
        return await self._run(user, model)

    async def _run(self, user: str, model: Model) -> TrainingRun:
        """Of another user's run only what its published checkpoints show."""
        if model.user == user:
            saved = await self._checkpoints.list(user, ALL, 0, model.model_id)
            model = replace(model, user_metadata=await self._metadata_of(model))
        else:
            saved = await self._publications.of_model(model.model_id)
            newest = max((c.created_at for c in saved), default=model.created_at)
            model = replace(model, user_metadata={}, last_request_at=newest)
        training = next((c for c in saved if c.segment == "weights"), None)
        sampler = next((c for c in saved if c.segment == "sampler_weights"), None)
        return TrainingRun(
            training_run_id=model.model_id,
            base_model=model.base_model,
            model_owner=model.user,
            is_lora=model.lora.rank > 0,
            lora_rank=model.lora.rank,
            last_request_time=_time(model.last_request_at),
            last_checkpoint=None if training is None else checkpoint_view(training),
            last_sampler_checkpoint=None if sampler is None else checkpoint_view(sampler),
            user_metadata=dict(model.user_metadata),
        )

    async def _metadata_of(self, model: Model) -> Mapping[str, str]:
        """The user's own, and what every client can show in no other place."""
        numerics = await self._journal.numerics(model.user, model.model_id)
        if numerics is None or numerics.inexact_since is None:
            return model.user_metadata
        return {**model.user_metadata, NOT_BIT_EXACT: f"step {numerics.inexact_since}"}

    async def checkpoints_of_run(self, user: str, run_id: str) -> CheckpointsListResponse:
        """Of another user's run the published ones."""
        model = await self._publications.accessible_model(run_id, user)
        if model is None:
            raise ModelNotFound(run_id)
        if model.user == user:
            checkpoints = await self._checkpoints.list(user, ALL, 0, run_id)
        else:
            checkpoints = await self._publications.of_model(run_id)
        return CheckpointsListResponse(checkpoints=[checkpoint_view(c) for c in checkpoints])

    async def checkpoints(self, user: str, limit: int, offset: int) -> CheckpointsListResponse:
        checkpoints = await self._checkpoints.list(user, limit, offset)
        total = await self._checkpoints.num_checkpoints(user)
        return CheckpointsListResponse(
            checkpoints=[checkpoint_view(c) for c in checkpoints],
            cursor=Cursor(offset=offset, limit=limit, total_count=total),
        )

    async def session_contents(self, user: str, session_id: str) -> tuple[list[str], list[str]]:
        """(training run ids, sampler ids); ephemeral samplers are not listed."""
        models = await self._metadata.models_of_session(session_id, user)
        samplers = await self._metadata.samplers_of_session(session_id, user)
        listed = [s.sampler_id for s in samplers if s.kind in ("base", "checkpoint")]
        return [model.model_id for model in models], listed


def tinker_path(run_id: str, checkpoint_id: str) -> str:
    return f"{SCHEME}{run_id}/{checkpoint_id}"


def checkpoint_view(checkpoint: Checkpoint) -> CheckpointView:
    return CheckpointView(
        checkpoint_id=checkpoint.checkpoint_id,
        checkpoint_type=CHECKPOINT_SEGMENTS[checkpoint.segment],
        time=_time(checkpoint.created_at),
        tinker_path=checkpoint.tinker_path,
        size_bytes=checkpoint.size_bytes,
        public=checkpoint.public,
        user_metadata=dict(checkpoint.user_metadata),
        expires_at=None if checkpoint.expires_at is None else _time(checkpoint.expires_at),
    )


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
