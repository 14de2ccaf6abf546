"""Models, checkpoints and samplers: everything about them except the weights."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from tinkercloud.storage.database import Database, Row
from tinkercloud.storage.session_storage import DEFAULT_PROJECT

ModelState = Literal["live", "failed", "deleted", "archive"]
"""archive: it holds copied or imported checkpoints and was never trained here."""
Segment = Literal["weights", "sampler_weights", "external_weights"]
SamplerKind = Literal["base", "checkpoint", "snapshot", "inflight"]


@dataclass(frozen=True, slots=True)
class LoraRecord:
    """How a model is trained; rank 0 is full-parameter training."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class Model:
    model_id: str
    user: str
    session_id: str
    base_model: str
    lora: LoraRecord
    user_metadata: Mapping[str, str]
    created_at: float
    last_request_at: float
    state: ModelState = "live"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """directory: relative to the data folder. expires_at None: kept until deleted. public: every
    user may read it. request_id: of the operation that saved it."""

    model_id: str
    segment: Segment
    name: str
    user: str
    directory: str
    base_model: str
    lora: LoraRecord
    with_optimizer: bool
    size_bytes: int
    user_metadata: Mapping[str, str]
    created_at: float
    expires_at: float | None = None
    public: bool = False
    request_id: str | None = None

    @property
    def checkpoint_id(self) -> str:
        return f"{self.segment}/{self.name}"

    @property
    def tinker_path(self) -> str:
        return f"tinker://{self.model_id}/{self.checkpoint_id}"


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampling session. model_id: of a snapshot or inflight one, and request_id: of the operation
    that made it. directory: of a checkpoint."""

    sampler_id: str
    user: str
    session_id: str
    kind: SamplerKind
    base_model: str
    model_id: str | None = None
    model_path: str | None = None
    directory: str | None = None
    request_id: str | None = None


def model_of(row: Row) -> Model:
    fields = dict(row)
    fields["lora"] = LoraRecord(**json.loads(row["lora"]))
    fields["user_metadata"] = json.loads(row["user_metadata"])
    return Model(**fields)


CHECKPOINTS = (
    "SELECT checkpoints.*, published.directory IS NOT NULL AS public"
    " FROM checkpoints LEFT JOIN published USING (directory)"
)
"""Rows for `checkpoint_of`; a condition follows."""


def checkpoint_of(row: Row) -> Checkpoint:
    fields = dict(row)
    fields["lora"] = LoraRecord(**json.loads(row["lora"]))
    fields["user_metadata"] = json.loads(row["user_metadata"])
    fields["with_optimizer"] = bool(row["with_optimizer"])
    fields["public"] = bool(row["public"])
    return Checkpoint(**fields)


def _sampler(row: Row) -> Sampler:
    fields = dict(row)
    del fields["created_at"]
    return Sampler(**fields)


ALIVE = "(expires_at IS NULL OR expires_at > ?)"


_IN_PROJECT = (
    "(? IS NULL OR session_id IN (SELECT session_id FROM sessions WHERE sessions.user ="
    f" models.user AND COALESCE(json_extract(details, '$.project_id'), '{DEFAULT_PROJECT}') = ?))"
)


class MetadataStorage:
    """Reads take the user and show nothing of anybody else's; expired checkpoints do not exist."""

    def __init__(self, database: Database):
        self._database = database

    # models

    async def put_model(self, model: Model) -> None:
        """Nothing happens where there is one of that id: a repeated request."""
        await self._database.write(
            "INSERT OR IGNORE INTO models (model_id, user, session_id, base_model, lora,"
            " user_metadata, created_at, last_request_at, state)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(model.model_id, model.user, model.session_id, model.base_model),
            *(json.dumps(asdict(model.lora)), json.dumps(dict(model.user_metadata))),
            *(model.created_at, model.last_request_at, model.state),
        )

    async def model(self, model_id: str, user: str) -> Model | None:
        row = await self._database.one(
            "SELECT * FROM models WHERE model_id = ? AND user = ?", model_id, user
        )
        return None if row is None else model_of(row)

    async def latest_published(self, user: str, model_id: str) -> str | None:
        """The id of a model's newest sampler, or the path of its newest sampler weights, whichever
        was published last."""
        row = await self._database.one(
            "SELECT name FROM (SELECT sampler_id AS name, created_at FROM samplers"
            " WHERE user = ?1 AND model_id = ?2 UNION ALL"
            " SELECT 'tinker://' || model_id || '/' || segment || '/' || name, created_at"
            " FROM checkpoints WHERE user = ?1 AND model_id = ?2 AND segment = 'sampler_weights'"
            " AND (expires_at IS NULL OR expires_at > ?3)) ORDER BY created_at DESC LIMIT 1",
            *(user, model_id, time.time()),
        )
        return None if row is None else row["name"]

    async def set_model_state(self, model_id: str, state: ModelState) -> None:
        await self._database.write(
            "UPDATE models SET state = ? WHERE model_id = ?", state, model_id
        )

    async def set_model_lora(self, model_id: str, lora: LoraRecord) -> None:
        await self._database.write(
            "UPDATE models SET lora = ? WHERE model_id = ?", json.dumps(asdict(lora)), model_id
        )

    async def touch_model(self, model_id: str) -> None:
        await self._database.write(
            "UPDATE models SET last_request_at = ? WHERE model_id = ?", time.time(), model_id
        )

    async def models(
        self, user: str, limit: int, offset: int, project_id: str | None = None
    ) -> list[Model]:
        """Newest first; deleted ones too (their checkpoints may live), failed ones not."""
        rows = await self._database.all(
            f"SELECT * FROM models WHERE user = ? AND state != 'failed' AND {_IN_PROJECT}"
            " ORDER BY created_at DESC, model_id LIMIT ? OFFSET ?",
            *(user, project_id, project_id, limit, offset),
        )
        return [model_of(row) for row in rows]

    async def num_models(self, user: str, project_id: str | None = None) -> int:
        row = await self._database.one(
            "SELECT COUNT(*) AS num FROM models WHERE user = ? AND state != 'failed'"
            f" AND {_IN_PROJECT}",
            *(user, project_id, project_id),
        )
        return 0 if row is None else row["num"]

    async def live_models(self, user: str) -> list[Model]:
        rows = await self._database.all(
            "SELECT * FROM models WHERE user = ? AND state = 'live'", user
        )
        return [model_of(row) for row in rows]

    async def models_of_session(self, session_id: str, user: str) -> list[Model]:
        rows = await self._database.all(
            "SELECT * FROM models WHERE session_id = ? AND user = ? AND state != 'failed'"
            " ORDER BY created_at, model_id",
            *(session_id, user),
        )
        return [model_of(row) for row in rows]

    # checkpoints

    async def put_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Also replaces one of the same name: readers see the old row or the new one."""
        c = checkpoint
        await self._database.write(
            "INSERT OR REPLACE INTO checkpoints (model_id, segment, name, user, directory,"
            " base_model, lora, with_optimizer, size_bytes, user_metadata, created_at, expires_at,"
            " request_id) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(c.model_id, c.segment, c.name, c.user, c.directory, c.base_model),
            *(json.dumps(asdict(c.lora)), int(c.with_optimizer), c.size_bytes),
            *(json.dumps(dict(c.user_metadata)), c.created_at, c.expires_at, c.request_id),
        )

    async def checkpoint(
        self, model_id: str, segment: str, name: str, user: str
    ) -> Checkpoint | None:
        checkpoint = await self.checkpoint_even_expired(model_id, segment, name, user)
        if checkpoint is None or checkpoint.expires_at is None:
            return checkpoint
        return checkpoint if checkpoint.expires_at > time.time() else None

    async def checkpoint_even_expired(
        self, model_id: str, segment: str, name: str, user: str
    ) -> Checkpoint | None:
        """For a save that replaces it."""
        row = await self._database.one(
            f"{CHECKPOINTS} WHERE model_id = ? AND segment = ? AND name = ? AND user = ?",
            *(model_id, segment, name, user),
        )
        return None if row is None else checkpoint_of(row)

    async def checkpoints(
        self, user: str, limit: int, offset: int, model_id: str | None = None
    ) -> list[Checkpoint]:
        """Newest first; of one model or of all."""
        rows = await self._database.all(
            f"{CHECKPOINTS} WHERE user = ? AND {ALIVE} AND (? IS NULL OR model_id = ?)"
            " ORDER BY created_at DESC, model_id, segment, name LIMIT ? OFFSET ?",
            *(user, time.time(), model_id, model_id, limit, offset),
        )
        return [checkpoint_of(row) for row in rows]

    async def checkpoints_named(self, user: str, segment: str, name: str) -> list[Checkpoint]:
        """One at most of each model; newest first."""
        rows = await self._database.all(
            f"{CHECKPOINTS} WHERE user = ? AND {ALIVE} AND segment = ? AND name = ?"
            " ORDER BY created_at DESC, model_id",
            *(user, time.time(), segment, name),
        )
        return [checkpoint_of(row) for row in rows]

    async def num_checkpoints(self, user: str) -> int:
        row = await self._database.one(
            f"SELECT COUNT(*) AS num FROM checkpoints WHERE user = ? AND {ALIVE}",
            *(user, time.time()),
        )
        return 0 if row is None else row["num"]

    async def num_checkpoint_bytes(self, user: str) -> int:
        """Of all that are there, expired ones too until their files are removed."""
        row = await self._database.one(
            "SELECT COALESCE(SUM(size_bytes), 0) AS num FROM checkpoints WHERE user = ?", user
        )
        return 0 if row is None else row["num"]

    async def set_expiry(self, checkpoint: Checkpoint, expires_at: float | None) -> Checkpoint:
        await self._database.write(
            "UPDATE checkpoints SET expires_at = ? WHERE directory = ?",
            *(expires_at, checkpoint.directory),
        )
        return replace(checkpoint, expires_at=expires_at)

    async def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        await self._database.write(
            "DELETE FROM checkpoints WHERE directory = ?", checkpoint.directory
        )
        await self._database.write(
            "DELETE FROM published WHERE directory = ?", checkpoint.directory
        )

    async def directories(self) -> dict[str, set[str]]:
        """Of the checkpoints of each model, expired ones too: for maintenance."""
        rows = await self._database.all(
            "SELECT models.model_id, directory FROM models LEFT JOIN checkpoints USING (model_id)"
        )
        directories: dict[str, set[str]] = {row["model_id"]: set() for row in rows}
        for model_id, directory in rows:
            if directory is not None:
                directories[model_id].add(directory)
        return directories

    async def expired_checkpoints(self) -> list[Checkpoint]:
        """Of all users: for maintenance."""
        rows = await self._database.all(f"{CHECKPOINTS} WHERE expires_at <= ?", time.time())
        return [checkpoint_of(row) for row in rows]

    # samplers

    async def put_sampler(self, sampler: Sampler) -> None:
        s = sampler
        await self._database.write(
            "INSERT OR IGNORE INTO samplers (sampler_id, user, session_id, kind, base_model,"
            " model_id, model_path, directory, request_id, created_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(s.sampler_id, s.user, s.session_id, s.kind, s.base_model),
            *(s.model_id, s.model_path, s.directory, s.request_id, time.time()),
        )

    async def sampler(self, sampler_id: str, user: str) -> Sampler | None:
        row = await self._database.one(
            "SELECT * FROM samplers WHERE sampler_id = ? AND user = ?", sampler_id, user
        )
        return None if row is None else _sampler(row)

    async def is_sampled(self, user: str, model_id: str) -> bool:
        """Whether a sampler of an open session has weights that only the model's journal has."""
        row = await self._database.one(
            "SELECT 1 FROM samplers JOIN sessions USING (session_id) WHERE model_id = ?"
            " AND samplers.user = ? AND finished_at IS NULL LIMIT 1",
            *(model_id, user),
        )
        return row is not None

    async def sampler_of_request(self, request_id: str, user: str) -> Sampler | None:
        """The one that an operation made."""
        row = await self._database.one(
            "SELECT * FROM samplers WHERE request_id = ? AND user = ?", request_id, user
        )
        return None if row is None else _sampler(row)

    async def samplers_of_session(self, session_id: str, user: str) -> list[Sampler]:
        rows = await self._database.all(
            "SELECT * FROM samplers WHERE session_id = ? AND user = ? ORDER BY created_at",
            *(session_id, user),
        )
        return [_sampler(row) for row in rows]

    async def add_sampler_client(self, sampler: Sampler) -> int:
        """How many clients have joined, with this one; the caller sees to one call at a time."""
        await self._database.write(
            "INSERT INTO sampler_clients (sampler_id, user, num_joined) VALUES (?, ?, 1)"
            " ON CONFLICT (sampler_id) DO UPDATE SET num_joined = num_joined + 1",
            *(sampler.sampler_id, sampler.user),
        )
        row = await self._database.one(
            "SELECT num_joined FROM sampler_clients WHERE sampler_id = ? AND user = ?",
            *(sampler.sampler_id, sampler.user),
        )
        assert row is not None
        return row["num_joined"]
