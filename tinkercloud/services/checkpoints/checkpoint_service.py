"""Checkpoints: saving, naming, finding, expiring."""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, get_args

from tinker_gmi.types import WeightsInfoResponse
from tinkercloud.backends.base import Backend
from tinkercloud.errors import CheckpointNotFound, InvalidRequest, StorageFailed, UserError
from tinkercloud.services.checkpoints import checkpoint_files
from tinkercloud.services.checkpoints.checkpoint_names import Nearby, full_path
from tinkercloud.services.checkpoints.checkpoint_writer import (
    FOLDER,
    CheckpointWriter,
    Fill,
    SaveOptions,
)
from tinkercloud.services.common.numbers import checked
from tinkercloud.storage.audit_log import AuditLog
from tinkercloud.storage.metadata import Checkpoint, MetadataStorage, Model, Segment
from tinkercloud.storage.publications import PublicationStorage

logger = logging.getLogger(__name__)

SCHEME = "tinker://"
SEGMENTS: tuple[str, ...] = get_args(Segment)
MAX_TTL_S = 315_360_000  # ten years (wire specification, section 11)
Convert = Callable[[Path, Path], None]
_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,128}")


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"checkpoint name {name!r} is not allowed: 1 to 128 of A-Z a-z 0-9 . _ - and no "
            "leading dot"
        )
    return name


def check_ttl(ttl_s: int | None) -> int | None:
    return None if ttl_s is None else checked("ttl_seconds", ttl_s, lowest=1, highest=MAX_TTL_S)


def parse_path(path: str) -> tuple[str, str, str]:
    """(model_id, segment, name) of exactly tinker://MODEL/SEGMENT/NAME (wire specification,
    section 11)."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in SEGMENTS:
        raise InvalidRequest(
            f"{path!r} is no checkpoint path; one reads tinker://MODEL/SEGMENT/NAME with SEGMENT "
            f"one of {', '.join(SEGMENTS)}"
        )
    return parts[0], parts[1], check_name(parts[2])


class KeyLookup(Protocol):
    def user_of(self, key: str) -> str | None: ...


@dataclass(frozen=True, slots=True)
class CheckpointStores:
    """What is known of checkpoints, and whose key a weights access token is."""

    metadata: MetadataStorage
    publications: PublicationStorage
    keys: KeyLookup
    audit: AuditLog


class CheckpointService:
    def __init__(self, backend: Backend, stores: CheckpointStores, data_dir: Path):
        self._backend = backend
        self._metadata = stores.metadata
        self._publications = stores.publications
        self._keys = stores.keys
        self._audit = stores.audit
        self._data_dir = data_dir
        self._writer = CheckpointWriter(stores.metadata, data_dir)

    async def start(self) -> None:
        root = self._data_dir / FOLDER
        await asyncio.to_thread(checkpoint_files.remove_temporaries, root)
        await asyncio.to_thread(checkpoint_files.flush_folders, root, 3)
        await self._remove_unnamed(root)

    async def _remove_unnamed(self, root: Path) -> None:
        """What a process left that ended between a change of files and that of rows. Only of models
        that the database knows: with another database, or none, all files stay."""
        named = await self._metadata.directories()
        for model_id, directories in named.items():
            for folder in await asyncio.to_thread(checkpoint_files.folders_of, root, model_id):
                if str(folder.relative_to(self._data_dir)) not in directories:
                    logger.warning("%s is of no checkpoint, and is removed", folder)
                    await asyncio.to_thread(checkpoint_files.remove, folder)

    # saving: called in the model's lane, so never twice at once for one model

    async def save(
        self, model: Model, options: SaveOptions, convert: Convert | None = None
    ) -> Checkpoint:
        """Write the model as it is now; InvalidRequest where the name is taken. What the same
        operation saved before, when it was not seen to its end, is left as it is.

        convert(source, target): makes the files of the checkpoint of those that the backend wrote,
        and uses these up.
        """
        check_name(options.name)
        check_ttl(options.ttl_s)
        old = await self._metadata.checkpoint_even_expired(
            model.model_id, options.segment, options.name, model.user
        )
        if old is not None and options.request_id and old.request_id == options.request_id:
            await self._remove_others(old)
            return old
        expired = old is not None and old.expires_at is not None and old.expires_at <= time.time()
        if old is not None and not expired and not options.overwrite:
            raise InvalidRequest(
                f"checkpoint {old.tinker_path} exists already; choose another name or set overwrite"
            )
        checkpoint = await self._writer.write(model, options, self._fill(model, options, convert))
        try:
            await self._after_save(checkpoint, old)
        except (StorageFailed, OSError):  # it is saved: to say that it is not would be wrong
            logger.exception(
                "%s is saved, and not all about it is on record", checkpoint.tinker_path
            )
        return checkpoint

    async def _after_save(self, checkpoint: Checkpoint, old: Checkpoint | None) -> None:
        size, replaced = checkpoint.size_bytes, old is not None
        try:
            await self.audit(checkpoint, "checkpoint_saved", size_bytes=size, replaced=replaced)
            if old is not None:
                await self._publications.unpublish(old)
        finally:  # not earlier: until the row names the new folder, readers open the old one
            await self._remove_others(checkpoint)

    async def _remove_others(self, checkpoint: Checkpoint) -> None:
        """Of its name: what it replaced, and what a process left that ended before the row was
        written or the old folder removed."""
        directory = self._data_dir / checkpoint.directory
        await asyncio.to_thread(checkpoint_files.remove_others, directory)

    def _fill(self, model: Model, options: SaveOptions, convert: Convert | None) -> Fill:
        async def fill(directory: Path) -> None:
            with_optimizer = options.with_optimizer
            if convert is None:
                await self._backend.save_model(
                    model.model_id, directory, with_optimizer=with_optimizer
                )
                return
            source = directory / "source"
            source.mkdir()
            await self._backend.save_model(model.model_id, source, with_optimizer=with_optimizer)
            await asyncio.to_thread(convert, source, directory)

        return fill

    async def require_room(
        self, source: Checkpoint, model: Model, max_user_bytes: int | None
    ) -> None:
        """For a copy. Raises QuotaExceeded."""
        copy = replace(source, model_id=model.model_id, user=model.user)
        await self._writer.require_room(copy, source.size_bytes, max_user_bytes)

    async def copy(
        self, source: Checkpoint, model: Model, ttl_s: int | None, max_user_bytes: int | None = None
    ) -> Checkpoint:
        """The same checkpoint as one of `model`; storage is shared. max_user_bytes: as of
        `SaveOptions`."""
        copy = await self._writer.copy(source, model, check_ttl(ttl_s), max_user_bytes)
        await self.audit(source, "checkpoint_read", actor=model.user, purpose="copy")
        await self.audit(copy, "checkpoint_copied", source=source.tinker_path)
        return copy

    async def audit(self, checkpoint: Checkpoint, event: str, **details: object) -> None:
        """An entry in its owner's audit log."""
        path = {"tinker_path": checkpoint.tinker_path}
        await self._audit.record(checkpoint.user, "checkpoints", event, **path, **details)

    # finding

    async def full_path(self, user: str, path: str, nearby: Nearby | None = None) -> str:
        """The path that a bare name stands for. Raises InvalidRequest or CheckpointNotFound."""
        return await full_path(self._metadata, user, path, nearby)

    async def resolve(self, user: str, path: str) -> Checkpoint:
        """The user's own, to change it. Raises InvalidRequest or CheckpointNotFound."""
        model_id, segment, name = parse_path(path)
        checkpoint = await self._metadata.checkpoint(model_id, segment, name, user)
        if checkpoint is None:
            raise CheckpointNotFound(path)
        return checkpoint

    def owner_of(self, weights_access_token: str | None) -> str | None:
        """The account whose key the token is: None without a token, "" for nobody's key."""
        if not weights_access_token:
            return None
        return self._keys.user_of(weights_access_token) or ""

    async def readable(self, user: str, path: str, owner: str | None = None) -> Checkpoint:
        """One that the user may read: an own one, a published one, or one of `owner_of` a token.
        Raises InvalidRequest, CheckpointNotFound, and UserError for a token that is nobody's
        key."""
        model_id, segment, name = parse_path(path)
        checkpoint = await self._metadata.checkpoint(model_id, segment, name, user)
        if checkpoint is None:
            checkpoint = await self._publications.checkpoint(model_id, segment, name)
        if checkpoint is None and owner is not None:
            if not owner:
                raise UserError(
                    "weights_access_token is no key of this server; it is a key of the account "
                    "that owns the weights"
                )
            checkpoint = await self._metadata.checkpoint(model_id, segment, name, owner)
        if checkpoint is None:
            raise CheckpointNotFound(path)
        return checkpoint

    async def loadable(self, user: str, path: str, owner: str | None = None) -> Checkpoint:
        """The same, of those that this server can train or sample. Raises InvalidRequest too."""
        checkpoint = await self.readable(user, path, owner)
        if checkpoint.segment == "external_weights":
            raise InvalidRequest(
                f"{path} is an export for other programs; download it, or name the weights/ or "
                "sampler_weights/ checkpoint of the run here"
            )
        return checkpoint

    async def is_foreign(self, user: str, directory: str) -> bool:
        """Whether the checkpoint saved there is another user's."""
        owner = await self._publications.owner(directory)
        return owner is not None and owner != user

    async def require_readable(self, user: str, directory: str, path: str) -> Checkpoint:
        """What is saved in a folder. Raises CheckpointNotFound where it is gone, or a foreign one
        that is no longer published."""
        checkpoint = await self._publications.at_directory(directory, user)
        if checkpoint is None:
            raise CheckpointNotFound(path)
        return checkpoint

    async def verified(self, checkpoint: Checkpoint) -> Path:
        """Its folder, after the hashes were checked."""
        return await self.verified_directory(checkpoint.directory)

    async def verified_directory(self, directory: str) -> Path:
        """The same, for a folder relative to the data folder. Raises CheckpointNotFound."""
        path = self._data_dir / directory
        if not path.is_dir():  # deleted, or replaced by another of its name
            raise CheckpointNotFound(directory)
        await asyncio.to_thread(checkpoint_files.verify, path)
        return path

    async def list(
        self, user: str, limit: int, offset: int, model_id: str | None = None
    ) -> list[Checkpoint]:
        return await self._metadata.checkpoints(user, limit, offset, model_id)

    async def num_checkpoints(self, user: str) -> int:
        return await self._metadata.num_checkpoints(user)

    async def weights_info(self, user: str, path: str) -> WeightsInfoResponse:
        checkpoint = await self.readable(user, await self.full_path(user, path))
        lora = checkpoint.lora
        return WeightsInfoResponse(
            base_model=checkpoint.base_model,
            is_lora=lora.rank > 0,
            lora_rank=lora.rank,
            train_unembed=lora.train_unembed,
            train_mlp=lora.train_mlp,
            train_attn=lora.train_attn,
            optimizer_config={"type": "adamw"},
        )

    # changing

    async def delete(self, user: str, path: str) -> None:
        checkpoint = await self.resolve(user, path)
        await self._remove(checkpoint)
        await self.audit(checkpoint, "checkpoint_deleted")

    async def publish(self, user: str, path: str) -> None:
        """Let every user of this server read it; publishing twice changes nothing."""
        checkpoint = await self.resolve(user, path)
        await self._publications.publish(checkpoint)
        await self.audit(checkpoint, "checkpoint_published")

    async def unpublish(self, user: str, path: str) -> None:
        checkpoint = await self.resolve(user, path)
        await self._publications.unpublish(checkpoint)
        await self.audit(checkpoint, "checkpoint_unpublished")

    async def set_ttl(self, user: str, path: str, ttl_s: int | None) -> None:
        check_ttl(ttl_s)
        checkpoint = await self.resolve(user, path)
        expires_at = None if ttl_s is None else time.time() + ttl_s
        await self._metadata.set_expiry(checkpoint, expires_at)
        await self.audit(checkpoint, "checkpoint_ttl_set", ttl_seconds=ttl_s)

    async def remove_expired(self) -> None:
        for checkpoint in await self._metadata.expired_checkpoints():
            await self._remove(checkpoint)
            await self.audit(checkpoint, "checkpoint_deleted", actor="server", reason="expired")

    async def remove_unrecorded(self) -> None:
        """The files of saves that failed because the database took no row."""
        unrecorded = self._writer.unrecorded
        while unrecorded:
            # First a row that the disk does take: until then a crash could still bring back the
            # one that failed, as what SQLite wrote of it lies in the log until it is overwritten.
            await self.audit(
                unrecorded[0], "checkpoint_deleted", actor="server", reason="not recorded"
            )
            directory = self._data_dir / unrecorded.pop(0).directory
            await asyncio.to_thread(checkpoint_files.remove, directory)

    async def _remove(self, checkpoint: Checkpoint) -> None:
        # the row first: a row without files would be a promise that cannot be kept
        await self._metadata.delete_checkpoint(checkpoint)
        await asyncio.to_thread(checkpoint_files.remove, self._data_dir / checkpoint.directory)
