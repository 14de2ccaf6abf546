"""A run's model at an earlier step, as a checkpoint of a new model."""

import time
import uuid
from pathlib import Path

from tinkercloud.backends.base import Backend
from tinkercloud.services.checkpoints.checkpoint_writer import CheckpointWriter, SaveOptions
from tinkercloud.services.runs.kept_runs import KeptRun
from tinkercloud.storage.database import Database
from tinkercloud.storage.metadata import Checkpoint, MetadataStorage, Model
from tinkercloud.storage.session_storage import SessionStorage


async def put_branch(
    database: Database, data_dir: Path, backend: Backend, kept: KeptRun, step: int
) -> Checkpoint:
    """The run's model as the backend has it now, with the optimizer's state; training goes on from
    it as from any checkpoint."""
    metadata = MetadataStorage(database)
    session_id, now = str(uuid.uuid4()), time.time()
    branch = Model(
        f"{session_id}:train:0",
        kept.run.user,
        session_id,
        kept.model.base_model,
        kept.model.lora,
        {"branch_of": kept.run.model_id, "step": str(step)},
        created_at=now,
        last_request_at=now,
        state="archive",
    )

    async def fill(directory: Path) -> None:
        await backend.save_model(kept.run.model_id, directory, with_optimizer=True)
        sessions = SessionStorage(database)
        await sessions.add(session_id, branch.user, {"tags": ["branch"]})
        await sessions.finish(session_id, "branched")
        await metadata.put_model(branch)

    options = SaveOptions("weights", f"step-{step}", with_optimizer=True)
    return await CheckpointWriter(metadata, data_dir).write(branch, options, fill)
