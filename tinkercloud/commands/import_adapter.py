"""What `tinkercloud import` does. A server on the same data folder sees the result at once."""

import asyncio
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from tinkercloud.commands.options import Arguments, complain, config_of, say, with_models
from tinkercloud.config import Config, ModelSource
from tinkercloud.errors import UserError
from tinkercloud.services.checkpoints.checkpoint_service import check_name
from tinkercloud.services.checkpoints.checkpoint_writer import CheckpointWriter, SaveOptions
from tinkercloud.storage.database import Database
from tinkercloud.storage.keys import DEFAULT_USER, KeyStore
from tinkercloud.storage.metadata import Checkpoint, LoraRecord, MetadataStorage, Model
from tinkercloud.storage.session_storage import SessionStorage
from tinkercloud.weights.adapter_folders import open_adapter
from tinkercloud.weights.peft_import import ImportedAdapter, write_imported


@dataclass(frozen=True, slots=True)
class Target:
    """Whose checkpoint of which base model, under which name."""

    base: ModelSource
    user: str
    name: str


def run(arguments: Arguments) -> int:
    config = with_models(config_of(arguments))
    target = Target(
        _source(config, arguments["base_model"]), arguments["user"], check_name(arguments["name"])
    )
    imported = open_adapter(arguments["adapter_dir"], target.base.path)
    checkpoint = asyncio.run(_record(config.data_dir, target, imported))
    say(checkpoint.tinker_path)
    if not _has_key(config.data_dir, target.user):
        complain(f"{target.user} has no key yet: tinkercloud keys add {target.user}")
    return 0


def _source(config: Config, name: str) -> ModelSource:
    for source in config.models:
        if source.name == name:
            return source
    names = ", ".join(source.name for source in config.models)
    raise UserError(f"no model {name!r} here; known: {names}. Name its files: --model {name}=PATH")


def _has_key(data_dir: Path, user: str) -> bool:
    keys = KeyStore(data_dir)
    try:
        return user == DEFAULT_USER or any(key.user == user for key in keys.list())
    finally:
        keys.close()


async def _record(data_dir: Path, target: Target, imported: ImportedAdapter) -> Checkpoint:
    """The checkpoint, in a run of its own that cannot be trained."""
    database = await Database.open(data_dir)
    metadata = MetadataStorage(database)
    session_id = str(uuid.uuid4())
    model = _model(target, imported, session_id)

    async def fill(directory: Path) -> None:
        await asyncio.to_thread(write_imported, imported, target.base.name, directory)
        sessions = SessionStorage(database)
        await sessions.add(session_id, target.user, {"tags": ["import"]})
        await sessions.finish(session_id, "imported")
        await metadata.put_model(model)

    try:
        writer = CheckpointWriter(metadata, data_dir)
        return await writer.write(model, SaveOptions("weights", target.name), fill)
    finally:
        await database.close()


def _model(target: Target, imported: ImportedAdapter, session_id: str) -> Model:
    spec, now = imported.spec, time.time()
    lora = LoraRecord(spec.rank, spec.seed, spec.train_attn, spec.train_mlp, spec.train_unembed)
    return Model(
        f"{session_id}:train:0",
        target.user,
        session_id,
        target.base.name,
        lora,
        {"imported": imported.format},
        created_at=now,
        last_request_at=now,
        state="archive",
    )
