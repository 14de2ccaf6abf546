"""Copies of checkpoints, each in a run of its own that cannot be trained."""

import asyncio
import json
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass

from tinker_gmi.types import CopyWeightsRequest, CopyWeightsResponse
from tinkercloud.errors import InvalidRequest
from tinkercloud.services.accounts.quotas import Quotas
from tinkercloud.services.accounts.session_service import SessionService
from tinkercloud.services.checkpoints.checkpoint_service import CheckpointService, check_ttl
from tinkercloud.services.common.numbers import checked
from tinkercloud.storage.metadata import Checkpoint, MetadataStorage, Model

ORIGIN = "copied_from"  # in a copy's metadata
MAX_KEY_CHARS = 256
MAX_PROJECT_CHARS = 256
MAX_MODEL_SEQ_ID = 10**9


@dataclass(frozen=True, slots=True)
class CopyHeaders:
    """idempotency_key: requests with the same one are one copy. weights_access_token: a key of the
    account that owns the source."""

    idempotency_key: str | None = None
    weights_access_token: str | None = None

    def __repr__(self) -> str:  # never with the token
        return f"CopyHeaders({self.idempotency_key!r})"


class CopyService:
    def __init__(
        self,
        checkpoints: CheckpointService,
        metadata: MetadataStorage,
        sessions: SessionService,
        quotas: Quotas,
    ):
        self._checkpoints = checkpoints
        self._metadata = metadata
        self._sessions = sessions
        self._quotas = quotas
        # One copy of a user at a time: a repeated request waits for the first.
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def copy(
        self, user: str, body: CopyWeightsRequest, headers: CopyHeaders
    ) -> CopyWeightsResponse:
        """Raises UserError for what cannot be read, or for a place that is taken."""
        check_ttl(body.ttl_seconds)
        token = headers.weights_access_token or body.weights_access_token
        owner = self._checkpoints.owner_of(token)
        source = await self._checkpoints.readable(user, body.source_path, owner)
        async with self._locks[user]:
            model_id = await self._place(user, body, headers)
            copied = await self._copy_once(user, body, source, model_id)
        return CopyWeightsResponse(tinker_path=copied.tinker_path)

    async def _copy_once(
        self, user: str, body: CopyWeightsRequest, source: Checkpoint, model_id: str
    ) -> Checkpoint:
        model = await self._metadata.model(model_id, user)
        if model is not None:
            if model.state != "archive" or model.user_metadata.get(ORIGIN) != body.source_path:
                raise InvalidRequest(
                    f"run {model_id!r} exists with other weights; take another model_seq_id"
                )
            copy = await self._metadata.checkpoint(model_id, source.segment, source.name, user)
            if copy is not None:
                return copy
        model = _archive(user, model_id, source, body.source_path)
        limit = self._quotas.checkpoint_bytes()
        await self._checkpoints.require_room(source, model, limit)
        await self._metadata.put_model(model)
        return await self._checkpoints.copy(source, model, body.ttl_seconds, limit)

    async def _place(self, user: str, body: CopyWeightsRequest, headers: CopyHeaders) -> str:
        """The id of the copy's run: in the session that is named, or in one of its own that belongs
        to the project that is named."""
        if body.session_id is not None and body.model_seq_id is not None:
            await self._sessions.require_open(user, body.session_id)
            number = checked("model_seq_id", body.model_seq_id, lowest=0, highest=MAX_MODEL_SEQ_ID)
            return f"{body.session_id}:train:{number}"
        project = body.destination_project_id
        if not project or len(project) > MAX_PROJECT_CHARS:
            raise InvalidRequest(
                "copy_weights needs destination_project_id, or session_id and model_seq_id; any "
                f"text of up to {MAX_PROJECT_CHARS} characters names a project"
            )
        session_id = _copy_session(user, headers.idempotency_key)
        details = {"tags": ["copy"], "project_id": project}
        await self._sessions.create_finished(user, session_id, details, "copied")
        return f"{session_id}:train:0"


def _copy_session(user: str, idempotency_key: str | None) -> str:
    """The same id for the same request, so that a repeated one finds its copy."""
    if idempotency_key is None:
        return str(uuid.uuid4())
    if len(idempotency_key) > MAX_KEY_CHARS:
        raise InvalidRequest(f"X-Idempotency-Key has more than {MAX_KEY_CHARS} characters")
    return str(uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(["copy", user, idempotency_key])))


def _archive(user: str, model_id: str, source: Checkpoint, path: str) -> Model:
    now = time.time()
    session_id = model_id.partition(":")[0]
    return Model(
        model_id,
        user,
        session_id,
        source.base_model,
        source.lora,
        {ORIGIN: path},
        created_at=now,
        last_request_at=now,
        state="archive",
    )
