"""New checkpoints: files written aside, sealed, moved into place, then put on record."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tinkercloud.errors import NO_WRITES, QuotaExceeded, StorageFailed
from tinkercloud.services.checkpoints import checkpoint_files
from tinkercloud.storage.metadata import Checkpoint, MetadataStorage, Model, Segment

FOLDER = "checkpoints"
Fill = Callable[[Path], Awaitable[None]]
"""Writes a checkpoint's files into an existing, empty folder."""


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """name: of the checkpoint, not yet checked. ttl_s None: kept until deleted. request_id: of the
    operation that saves it. max_user_bytes: what all checkpoints of the user may take; None: no
    limit."""

    segment: Segment
    name: str
    with_optimizer: bool = False
    ttl_s: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    request_id: str | None = None
    max_user_bytes: int | None = None


class CheckpointWriter:
    """On disk: data_dir/checkpoints/MODEL/SEGMENT/NAME/GENERATION. The database row says which
    generation is the checkpoint, so that replacing one is a single row update."""

    def __init__(self, metadata: MetadataStorage, data_dir: Path):
        self._metadata = metadata
        self._data_dir = data_dir
        self._one_at_a_time = asyncio.Lock()  # rows: each counts those before it
        self.unrecorded: list[Checkpoint] = []
        """Whose files are there, and whose row the database did not take. Those of a command stay
        until a server begins: until another row is taken, a crash could bring that one back."""

    async def write(self, model: Model, options: SaveOptions, fill: Fill) -> Checkpoint:
        """Make `fill` write a checkpoint of the model and put it on record, in place of one of
        that name."""
        now = time.time()
        checkpoint = Checkpoint(
            model_id=model.model_id,
            segment=options.segment,
            name=options.name,
            user=model.user,
            directory="",
            base_model=model.base_model,
            lora=model.lora,
            with_optimizer=options.with_optimizer,
            size_bytes=0,
            user_metadata=options.user_metadata,
            created_at=now,
            expires_at=None if options.ttl_s is None else now + options.ttl_s,
            request_id=options.request_id,
        )
        return await self._write(checkpoint, fill, options.max_user_bytes)

    async def copy(
        self,
        source: Checkpoint,
        model: Model,
        ttl_s: int | None,
        max_user_bytes: int | None = None,
    ) -> Checkpoint:
        """The same checkpoint as one of `model`, under its name; storage is shared. Raises
        StorageFailed where the disk takes no files."""
        now = time.time()
        checkpoint = replace(
            source,
            model_id=model.model_id,
            user=model.user,
            created_at=now,
            expires_at=None if ttl_s is None else now + ttl_s,
            public=False,
            request_id=None,
        )
        origin = self._data_dir / source.directory

        async def fill(directory: Path) -> None:
            await asyncio.to_thread(checkpoint_files.verify, origin)
            await asyncio.to_thread(checkpoint_files.link_files, origin, directory)

        try:
            return await self._write(checkpoint, fill, max_user_bytes)
        except OSError as error:
            if error.errno in NO_WRITES:
                raise StorageFailed(str(error.strerror)) from error
            raise

    async def _write(
        self, checkpoint: Checkpoint, fill: Fill, max_user_bytes: int | None
    ) -> Checkpoint:
        c = checkpoint
        await self.require_room(c, 1, max_user_bytes)  # before anything is written
        parent = Path(FOLDER, c.model_id, c.segment, c.name)
        target = parent / uuid.uuid4().hex[:12]
        place = self._data_dir / parent
        temporary = await asyncio.to_thread(checkpoint_files.new_temporary, place)
        try:
            await fill(temporary)
            size_bytes = await asyncio.to_thread(checkpoint_files.seal, temporary, _about(c))
            await asyncio.to_thread(
                checkpoint_files.move_into_place, temporary, self._data_dir / target
            )
        except BaseException:  # also when cancelled: nothing half written stays
            checkpoint_files.remove(temporary)
            checkpoint_files.remove(self._data_dir / target)  # renamed, and not flushed
            raise
        written = replace(checkpoint, directory=str(target), size_bytes=size_bytes)
        async with self._one_at_a_time:
            try:
                await self.require_room(written, size_bytes, max_user_bytes)
                await self._metadata.put_checkpoint(written)
            except QuotaExceeded:
                await asyncio.to_thread(checkpoint_files.remove, self._data_dir / target)
                raise
            except StorageFailed:
                self.unrecorded.append(written)
                raise
        return written

    async def require_room(
        self, checkpoint: Checkpoint, num_bytes: int, max_user_bytes: int | None
    ) -> None:
        """What it replaces makes room. Raises QuotaExceeded."""
        if max_user_bytes is None:
            return
        c = checkpoint
        place = (c.model_id, c.segment, c.name, c.user)
        old = await self._metadata.checkpoint_even_expired(*place)
        others = await self._metadata.num_checkpoint_bytes(c.user)
        others -= 0 if old is None else old.size_bytes
        if others + num_bytes > max_user_bytes:
            raise QuotaExceeded(
                f"the checkpoint {c.name!r} does not fit: its user's others have {others:,} bytes "
                f"and the quota of this key is {max_user_bytes:,}; delete some (`tinker checkpoint "
                "delete`), or save with ttl_seconds"
            )


def _about(checkpoint: Checkpoint) -> dict[str, object]:
    return {
        "model_id": checkpoint.model_id,
        "base_model": checkpoint.base_model,
        "lora": asdict(checkpoint.lora),
        "with_optimizer": checkpoint.with_optimizer,
        "created_at": checkpoint.created_at,
    }
